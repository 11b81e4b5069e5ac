"""From the body of a chat completion to the request for the engine, and to how its answers are to be read."""

from __future__ import annotations

from functools import partial
from typing import Any

from aotllm.errors import InvalidRequest
from aotllm.request import Request
from aotllm.sampling_params import SamplingParams
from aotllm.serving.models import ServedModel
from aotllm.serving.openai.message_reader import MessageForm
from aotllm.serving.openai.protocol import ChatCompletionRequest
from aotllm.serving.openai.reasoning import ReasoningMarkers, reasoning_markers
from aotllm.serving.openai.tools.base import ToolParser
from aotllm.serving.openai.tools.choose import tool_parser_class
from aotllm.serving.openai.tools.definitions import ToolUse, tool_use
from aotllm.serving.openai.tools.forms import tool_form
from aotllm.serving.openai.tools.instructions import described_in_words, knows_tools
from aotllm.serving.openai.tools.json_calls import JsonParser
from aotllm.serving.openai.tools.messages import template_messages
from aotllm.serving.openai.tools.named_call import NamedCallParser
from aotllm.serving.options import ServingOptions
from aotllm.structured_outputs import StructuredOutputs


class ChatRequest:
    """What a body asks of a model.

    Args:
        body: of the HTTP request.
        served: the model.
        options: of the server.

    Raises:
        InvalidRequest: a field is wrong; `param` names it.
    """

    def __init__(self, body: ChatCompletionRequest, served: ServedModel, options: ServingOptions) -> None:
        body.check_supported()
        if body.chat_template is not None and not options.trust_request_chat_template:
            raise InvalidRequest(
                "this server takes no chat templates from requests; leave chat_template out, or start it with "
                "--trust-request-chat-template",
                "chat_template",
            )
        self._body = body
        self._served = served
        self._template: str | None = body.chat_template or served.engine.tokenizer.chat_template
        self._use = tool_use(body.tools, body.tool_choice, body.parallel_tool_calls)
        if self._use is not None and body.use_beam_search:
            raise InvalidRequest("tools cannot be combined with beam search; leave one of them out", "tools")
        answer_form = body.form()
        form = tool_form(self._use, answer_form) if self._use is not None else answer_form
        markers = reasoning_markers(options.reasoning_parser, self._template)
        # A form holds from the first token on, so there is no room for reasoning, and the model had better know.
        template_defaults = {"enable_thinking": False} if markers is not None and form is not None else {}
        self.message_form = self._message_form(options, form, markers if form is None else None)
        """How the answers are to be read"""
        self.sampling: SamplingParams = body.sampling(
            served.engine.default_sampling,
            max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
            logprobs=body.num_top_logprobs(),
        )
        self.request = self._request(form, template_defaults)
        """For the engine"""

    def _request(self, form: StructuredOutputs | None, defaults: dict[str, Any]) -> Request:
        body, use = self._body, self._use
        messages = template_messages(body.messages, self._template)
        tools = [function.tool() for function in use.functions] if use is not None else None
        if not knows_tools(self._template):
            messages, tools = described_in_words(messages, use, self._template), None
        documents = {} if body.documents is None else {"documents": body.documents}
        return Request(
            messages=messages,
            tools=tools,
            sampling=self.sampling,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            chat_template=body.chat_template,
            chat_template_kwargs={**defaults, **body.chat_template_kwargs, **documents},
            structured_outputs=form,
            shown_special_tokens=self.message_form.shown_special_tokens,
            adapter=self._served.adapter,
            **body.request_options(),
        )

    def _message_form(
        self, options: ServingOptions, form: StructuredOutputs | None, markers: ReasoningMarkers | None
    ) -> MessageForm:
        use, include = self._use, self._body.include_reasoning
        if use is None:
            return MessageForm(markers, include)
        native = tool_parser_class(options.tool_call_parser, self._template)
        return MessageForm(
            markers,
            include,
            partial(_parser_class(use, form, native), use.allowed),
            call_id=(native or ToolParser).call_id,
            one_call=not use.parallel,
            ends_with_calls=use.mode != "named",
        )


def _parser_class(use: ToolUse, form: StructuredOutputs | None, native: type[ToolParser] | None) -> type[ToolParser]:
    if use.mode == "named":
        return NamedCallParser
    if form is not None:
        return JsonParser
    if native is None:
        raise InvalidRequest(
            "this server looks for no tool calls (--tool-call-parser none); set tool_choice to none, required, or a "
            "function",
            "tool_choice",
        )
    return native
