"""What a server says of itself before it is measured: models, tokenizer, which options it takes."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aotllm.bench.backends.base import Backend, RequestSettings
from aotllm.bench.backends.openai import error_message
from aotllm.bench.conversation import Message
from aotllm.bench.http_client import HttpAnswer, HttpClient
from aotllm.bench.record import RequestFailed, RequestRecord
from aotllm.bench.words import Words, words_of_tokenizer, words_of_usage
from aotllm.errors import AotllmError, InvalidRequest

_PROBE_TOKENS = 4
_REFUSED = ("http_400", "http_422", "grpc_invalid_argument")


@dataclass(frozen=True)
class ServedModelCard:
    """An entry of `/v1/models`."""

    name: str
    max_model_len: int | None


async def find_model(client: HttpClient, name: str | None) -> ServedModelCard:
    """The model of that name, or the server's first one.

    Raises:
        RequestFailed: the server cannot be reached.
        AotllmError: it does not list models, and none is named.
    """
    answer = await client.fetch("GET", "/v1/models")
    cards = _cards(answer)
    if name is not None:
        lengths = {card.name: card.max_model_len for card in cards}
        return ServedModelCard(name, lengths.get(name))
    if cards:
        return cards[0]
    reason = error_message(answer.body) or "no model in it"
    raise AotllmError(f"{client.url}/v1/models answers {answer.status}: {reason}; name the model with --model")


def _cards(answer: HttpAnswer) -> list[ServedModelCard]:
    try:
        entries = json.loads(answer.body)["data"] if answer.status == 200 else []
        return [ServedModelCard(entry["id"], entry.get("max_model_len")) for entry in entries]
    except (ValueError, KeyError, TypeError, AttributeError):
        return []


async def probe(
    backend: Backend, settings: RequestSettings, tell: Callable[[str], None]
) -> tuple[RequestSettings, RequestRecord]:
    """A first, unmeasured request: fails now rather than in each of a thousand. Options that the server refuses are
    left out one by one.

    Returns:
        The settings that the server takes, and what the request has brought.

    Raises:
        RequestFailed: it takes none.
    """
    dropped: list[str] = []
    while True:
        try:
            return settings, await _ask(backend, "Say hello.", _PROBE_TOKENS, settings)
        except RequestFailed as error:
            rest = settings.without()
            if error.error_kind not in _REFUSED or not rest:
                raise
            name, settings = rest[0]
            dropped.append(name)
            tell(f"the server refuses {name} ({error.message}); measuring without it")


async def _ask(backend: Backend, text: str, max_tokens: int, settings: RequestSettings) -> RequestRecord:
    record = RequestRecord(wanted_output=max_tokens)
    await backend.generate([Message("user", text)], max_tokens, settings, record)
    return record


async def calibrate(
    backend: Backend, settings: RequestSettings, client: HttpClient | None, count: Callable[[str], int] | None
) -> Words:
    """Words for texts of wanted lengths: by a local tokenizer, by the server's `/tokenize`, or by its usage."""
    if count is not None:

        async def local(text: str) -> int:
            return count(text)

        return await words_of_tokenizer(local, "counted by the local tokenizer")
    if client is not None and (remote := await _server_tokenizer(client, settings.model)) is not None:
        with suppress(RequestFailed, ValueError, KeyError, TypeError):  # such as a limit below the list of words
            return await words_of_tokenizer(remote, "counted by the server's /tokenize")

    async def prompt_tokens(text: str) -> int | None:
        return (await _ask(backend, text, 1, settings)).prompt_tokens

    try:
        return await words_of_usage(prompt_tokens)
    except RequestFailed:  # such as a context shorter than the probe
        return Words()


async def _server_tokenizer(client: HttpClient, model: str) -> Any:
    """Counts by `/tokenize` as vLLM and aotllm have it; None where there is none."""

    async def count(text: str) -> int:
        body = json.dumps({"model": model, "prompt": text, "add_special_tokens": False}).encode()
        answer = await client.fetch("POST", "/tokenize", body)
        if answer.status != 200:
            raise RequestFailed(f"http_{answer.status}", error_message(answer.body) or "")
        value = json.loads(answer.body)
        return int(value["count"])

    try:
        # A server that ignores the prompt, or counts something else, is not taken at its word.
        return count if 1 <= await count("time") <= 4 and await count("time and again") > 1 else None
    except (RequestFailed, ValueError, KeyError, TypeError):
        return None


def local_tokenizer(path: Path) -> Callable[[str], int]:
    """Counts tokens with an engine's tokenizer, a folder with a `tokenizer.json`, or such a file.

    Raises:
        InvalidRequest: there is none.
    """
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise InvalidRequest(
            f"--tokenizer takes an engine, a folder with a tokenizer.json or such a file; {path} is none of them",
            "tokenizer",
        )
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise InvalidRequest(f"--tokenizer {file} is not a tokenizer.json: {error}", "tokenizer") from None
    tokenizer.no_truncation()  # a setting for training batches
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)
