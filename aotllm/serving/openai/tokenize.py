"""`POST /tokenize` and `/detokenize`, in the forms of vLLM and of llama.cpp's server."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from aotllm.errors import InvalidRequest
from aotllm.serving.context import ServingContext
from aotllm.serving.engine import ServingEngine
from aotllm.serving.openai.logprobs import token_text
from aotllm.serving.router import Router
from aotllm.tokenization import Tokenizer


class _Body(BaseModel):
    model_config = ConfigDict(extra="allow")

    model: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _null_is_not_set(cls, body: Any) -> Any:
        return {name: value for name, value in body.items() if value is not None} if isinstance(body, dict) else body


class TokenizeRequest(_Body):
    """Body of `/tokenize`: one of `prompt`, `messages`, and `content`, which is llama.cpp's name."""

    prompt: str | None = Field(None, description="A text; special tokens are added unless told otherwise.")
    messages: list[dict[str, Any]] | None = Field(None, description="A conversation, for the chat template.")
    content: str | None = Field(None, description="A text; no special tokens are added unless add_special is set.")
    add_special_tokens: bool | None = Field(None, description="Default: true for prompt, false for messages.")
    add_special: bool = Field(False, description="The same for content.")
    add_generation_prompt: bool = Field(True, description="Of messages: end with the opening of an answer.")
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict, description="Of messages: for the template.")
    return_token_strs: bool = Field(False, description="Of prompt and messages: tell the texts of the tokens, too.")
    with_pieces: bool = Field(False, description="The same for content.")
    parse_special: bool = Field(True, description="Special tokens that are spelled out are recognized; always true.")

    def encode(self, tokenizer: Tokenizer, limit: int) -> list[int]:
        """Ids. Raises InvalidRequest, also for texts that are many times longer than the context of `limit` tokens."""
        given = [name for name in ("prompt", "messages", "content") if getattr(self, name) is not None]
        if len(given) != 1:
            raise InvalidRequest(
                f"one of prompt, messages and content is needed, got {' and '.join(given) or 'none'}", "prompt"
            )
        if not self.parse_special:
            raise InvalidRequest(
                "parse_special=false is not supported: special tokens are always recognized", "parse_special"
            )
        if self.content is not None:
            return tokenizer.encode(self.content, self.add_special, param="content", limit=limit)
        if self.prompt is not None:
            return tokenizer.encode(self.prompt, self.add_special_tokens is not False, limit=limit)
        reserved = {
            "messages",
            "add_generation_prompt",
            "tools",
            "add_special_tokens",
            "limit",
            "bos_token",
            "eos_token",
        }
        if taken := reserved & self.chat_template_kwargs.keys():
            raise InvalidRequest(f"chat_template_kwargs may not set {min(taken)}", "chat_template_kwargs")
        return tokenizer.encode_chat(
            [_plain(message, index) for index, message in enumerate(self.messages or ())],
            add_generation_prompt=self.add_generation_prompt,
            add_special_tokens=self.add_special_tokens is True,
            limit=limit,
            **self.chat_template_kwargs,
        )


def _plain(message: dict[str, Any], index: int) -> dict[str, Any]:
    """A message whose content is a text: parts of type text are joined. Raises InvalidRequest for other parts."""
    content = message.get("content")
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, dict) else None for part in content]
        if not all(isinstance(text, str) for text in texts):
            raise InvalidRequest(f"messages[{index}].content has a part without a text", "messages")
        content = "".join(map(str, texts))
    if not isinstance(message.get("role"), str) or not isinstance(content, (str, type(None))):
        raise InvalidRequest(
            f"messages[{index}] needs a role, and a text or a list of text parts as content, got {message!r:.80}",
            "messages",
        )
    return {**message, "content": content or ""}


class DetokenizeRequest(_Body):
    """Body of `/detokenize`."""

    tokens: list[int] = Field(description="Token ids.")


_TOKENIZE, _DETOKENIZE = f"{__name__}:TokenizeRequest", f"{__name__}:DetokenizeRequest"


def tokenize_routes(context: ServingContext) -> Router:
    """Also under /v1, where some clients look for them."""
    router = Router()

    # Texts may be long, and the library works without the GIL: not on the event loop.
    @router.post("/tokenize", body=_TOKENIZE)
    @router.post("/v1/tokenize", body=_TOKENIZE)
    async def post_tokenize(body: TokenizeRequest) -> dict[str, Any]:
        engine = context.models.get(body.model).engine
        return await asyncio.to_thread(_tokenize, engine, body)

    @router.post("/detokenize", body=_DETOKENIZE)
    @router.post("/v1/detokenize", body=_DETOKENIZE)
    async def post_detokenize(body: DetokenizeRequest) -> dict[str, Any]:
        engine = context.models.get(body.model).engine
        return await asyncio.to_thread(_detokenize, engine, body.tokens)

    return router


def _tokenize(engine: ServingEngine, body: TokenizeRequest) -> dict[str, Any]:
    tokenizer = engine.tokenizer
    tokens = body.encode(tokenizer, engine.max_seq_len)
    if body.content is not None:
        return {"tokens": [_piece(tokenizer, token) for token in tokens] if body.with_pieces else tokens}
    texts = [token_text(tokenizer, token) for token in tokens] if body.return_token_strs else None
    return {"count": len(tokens), "max_model_len": engine.max_seq_len, "tokens": tokens, "token_strs": texts}


def _piece(tokenizer: Tokenizer, token_id: int) -> dict[str, Any]:
    """As llama.cpp's server has it: bytes where a token is no text of its own."""
    data = tokenizer.token_bytes(token_id)
    try:
        return {"id": token_id, "piece": data.decode()}
    except UnicodeDecodeError:
        return {"id": token_id, "piece": list(data)}


def _detokenize(engine: ServingEngine, tokens: Sequence[int]) -> dict[str, Any]:
    size = engine.tokenizer.vocab_size
    for token in tokens:
        if not 0 <= token < size:
            raise InvalidRequest(f"tokens has {token}; token ids are integers from 0 to {size - 1}", "tokens")
    text = engine.tokenizer.decode(tokens, skip_special_tokens=False)
    return {"prompt": text, "content": text}  # vLLM's name, and llama.cpp's
