"""`ChatAnswer`: the shapes of the answer to a chat completion."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from aotllm.request import RequestOutput, SequenceOutput, TokenLogprob, TokenOutput
from aotllm.request_handle import RequestHandle
from aotllm.serving.engine import ServingEngine
from aotllm.serving.generation import merged
from aotllm.serving.openai.finish import finish_fields
from aotllm.serving.openai.logprobs import chat_logprobs, prompt_logprobs
from aotllm.serving.openai.message_reader import MessageForm, MessageReader, delta, message_fields
from aotllm.serving.openai.protocol import ChatCompletionRequest
from aotllm.serving.openai.sse import TEXT, Chunk, Shortcut, TextEvent
from aotllm.serving.openai.usage import usage, usage_of


class ChatAnswer:
    """One answer, whole or in chunks.

    Args:
        model: the name that answers.
        engine: what runs it.
        body: of the HTTP request.
        form: how the text is to be read.
    """

    def __init__(self, model: str, engine: ServingEngine, body: ChatCompletionRequest, form: MessageForm) -> None:
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._tokenizer = engine.tokenizer
        self._body = body
        self._form = form
        last = body.messages[-1]
        # Without the opening of the assistant's turn, the answer is more of the last message.
        self._role = "assistant" if body.add_generation_prompt else last["role"]
        self._echo = _text(last.get("content")) if body.echo and last["role"] == self._role else ""

    def whole(self, result: RequestOutput) -> dict[str, Any]:
        """A `chat.completion` object."""
        scored = {}
        if self._body.prompt_logprobs is not None:
            scored["prompt_logprobs"] = prompt_logprobs(self._tokenizer, result.prompt_logprobs)
        opened = self._form.opened(self._tokenizer, result.prompt_token_ids)
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [self._choice(output, opened) for output in result.outputs],
            "usage": self._usage_of(result),
            **scored,
        }

    def _choice(self, output: SequenceOutput, opened: bool) -> dict[str, Any]:
        fields: dict[str, Any] = {"content": output.text}
        end = finish_fields(output)
        if not self._form.plain:
            reader = MessageReader(self._form, opened)
            fields = message_fields(reader.read(output.text), self._form.call_id)
            end = self._end(output, reader)
        if self._echo:
            fields["content"] = self._echo + (fields["content"] or "")
        return {
            "index": output.index,
            "message": {"role": self._role, **fields},
            "logprobs": self._logprobs(output.logprobs),
            **end,
        }

    async def chunks(self, handle: RequestHandle, shortcut: Shortcut) -> AsyncIterator[Chunk]:
        """`chat.completion.chunk` objects: role with the first token, text, finish reason; usage where asked for."""
        options = self._body.stream_options
        count = 0
        continuous = options is not None and options.continuous_usage_stats
        opened = self._form.opened(self._tokenizer, handle.prompt_token_ids)

        def chunk(index: int, delta: dict[str, Any], **fields: Any) -> dict[str, Any]:
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **fields}
            usages = {"usage": usage(len(handle.prompt_token_ids), count)} if continuous else {}
            return {**self._head, "object": "chat.completion.chunk", "choices": [choice], **usages}

        plain = self._form.plain
        readers: dict[int, MessageReader | None] = {}
        text_events: dict[int, TextEvent] = {}

        def only_text(output: TokenOutput) -> bool:
            return plain and not (output.logprobs or continuous)

        def through(output: TokenOutput) -> bool:
            if output.index not in readers or output.finish_reason is not None or not only_text(output):
                return False
            return not output.text or shortcut(text_events[output.index](output.text))

        async for _, output in merged([handle], through):
            index = output.index
            count += len(output.token_ids)
            if index not in readers:
                readers[index] = None if plain else MessageReader(self._form, opened)
                text_events[index] = TextEvent(chunk(index, {"content": TEXT}))
                yield chunk(index, {"role": self._role, "content": ""})
                if self._echo:
                    yield chunk(index, {"content": self._echo})
            reader = readers[index]
            if reader is not None:
                for change, fields in self._read(output, reader):
                    yield chunk(index, change, **fields)
            else:
                if output.text and only_text(output):
                    yield text_events[index](output.text)
                elif output.text or output.logprobs:
                    yield chunk(index, {"content": output.text}, logprobs=self._logprobs(output.logprobs))
                if output.finish_reason is not None:
                    yield chunk(index, {"content": ""}, **finish_fields(output))
        if options is not None and options.include_usage:
            total = self._usage_of(handle.result())
            yield {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": total}

    def _read(self, output: TokenOutput, reader: MessageReader) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Deltas of an output, each with the other fields of its choice. The first one has the log-probabilities."""
        pieces = reader.push(output.text)
        if output.finish_reason is not None:
            pieces += reader.flush()
        parts: list[tuple[dict[str, Any], dict[str, Any]]] = [(delta(p, self._form.call_id), {}) for p in pieces]
        if output.logprobs and self._body.logprobs:
            if not parts:
                parts.append(({}, {}))
            parts[0][1]["logprobs"] = self._logprobs(output.logprobs)
        if output.finish_reason is not None:
            parts.append(({} if reader.has_calls else {"content": ""}, self._end(output, reader)))
        return parts

    def _end(self, output: TokenOutput | SequenceOutput, reader: MessageReader) -> dict[str, Any]:
        fields = finish_fields(output)
        if fields["finish_reason"] == "stop" and reader.has_calls and self._form.ends_with_calls:
            fields["finish_reason"] = "tool_calls"
        return fields

    def _usage_of(self, result: RequestOutput) -> dict[str, Any]:
        total = usage_of([result])
        if self._form.reasoning is not None:
            tokens = self._form.reasoning_tokens(self._tokenizer, result)
            total["completion_tokens_details"] = {"reasoning_tokens": tokens}
        return total

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        return chat_logprobs(self._tokenizer, logprobs) if self._body.logprobs else None


def _text(content: Any) -> str:
    """Of a content that has been checked."""
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content or ""
