"""Which parser reads an answer."""

from __future__ import annotations

from aotllm.serving.openai.tools.base import ToolParser
from aotllm.serving.openai.tools.hermes import HermesParser
from aotllm.serving.openai.tools.instructions import knows_tools
from aotllm.serving.openai.tools.json_calls import JsonParser
from aotllm.serving.openai.tools.llama3_json import Llama3JsonParser
from aotllm.serving.openai.tools.mistral import MistralParser

PARSERS: dict[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
    "json": JsonParser,
}
"""By the names that `--tool-call-parser` takes, besides auto and none"""

_SIGNS = (
    ("[TOOL_CALLS]", MistralParser),
    ("<tool_call>", HermesParser),
    ("<|python_tag|>", Llama3JsonParser),
    ("<|start_header_id|>", Llama3JsonParser),
)
"""What a template writes before a call in the history, or elsewhere, in the order in which they tell most"""


def tool_parser_class(option: str, chat_template: str | None) -> type[ToolParser] | None:
    """The parser that `--tool-call-parser` stands for; None = no calls are looked for.

    `auto` goes by what the chat template teaches the model. A template that says nothing of tools leaves it to us to
    describe them (`tools/instructions.py`), and we ask for plain JSON.
    """
    if option == "none":
        return None
    if option != "auto":
        return PARSERS[option]
    if not knows_tools(chat_template):
        return JsonParser
    template = chat_template or ""
    return next((parser for sign, parser in _SIGNS if sign in template), JsonParser)
