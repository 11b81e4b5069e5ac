"""The tokenizer of a Hugging Face folder: tokenizer.json, or tokenizer.model, and the files around it.

Which file wins follows transformers 5: `tokenizer.json` says all about ids (`add_bos_token` and `add_eos_token` of
`tokenizer_config.json` only count beside `tokenizer.model`); `chat_template.jinja` comes before the template in
`tokenizer_config.json`, and that before `chat_template.json`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from aotllm.builder.checkpoints.base import TokenizerAssets
from aotllm.builder.checkpoints.sentencepiece_tokenizer import (
    Piece,
    PieceType,
    SentencePieceModel,
    build_sentencepiece_tokenizer,
)
from aotllm.builder.checkpoints.sentencepiece_tokenizer_file import read_sentencepiece_model
from aotllm.builder.checkpoints.special_tokenizer_parts import SpecialTokens
from aotllm.errors import CheckpointError
from aotllm.tokenization.library_errors import library_errors

_CONFIG = "tokenizer_config.json"
_VOCABULARIES = ("tokenizer.json", "tokenizer.model")


def tokenizer_from_folder(folder: Path) -> TokenizerAssets:
    """Read the tokenizer of a checkpoint folder.

    `tokenizer.json` is kept byte for byte.

    Raises:
        CheckpointError: no vocabulary is there (the message lists what was looked for), or a file is malformed.
        UnsupportedModel: a SentencePiece model with a feature that is not implemented.
    """
    config = _read_json(folder / _CONFIG)
    generation = _read_json(folder / "generation_config.json")
    special = _special_tokens(folder, config)
    if (folder / "tokenizer.json").is_file():
        text = _from_tokenizer_json(folder / "tokenizer.json", generation, special)
    elif (folder / "tokenizer.model").is_file():
        text = _from_tokenizer_model(folder, config, special)
    else:
        raise CheckpointError(
            f"{folder.name} has no tokenizer: looked for {' and '.join(_VOCABULARIES)}; "
            "fetch one of them from where the model came from"
        )
    return TokenizerAssets(
        tokenizer_json=text,
        chat_template=_chat_template(folder, config),
        bos_token=special.bos,
        eos_token=special.eos,
        add_bos=special.add_bos,
        generation_config=generation,
    )


def _from_tokenizer_json(path: Path, generation: dict[str, Any], special: SpecialTokens) -> str:
    text = _read_text(path)
    with library_errors(lambda why: CheckpointError(f"{path.name} is not a tokenizer that can be read: {why}")):
        tokenizer = Tokenizer.from_str(text)
        framed = tokenizer.encode("a", add_special_tokens=True).tokens
    special.bos = special.bos or _token_of_id(tokenizer, generation.get("bos_token_id"))
    special.eos = special.eos or _token_of_id(tokenizer, generation.get("eos_token_id"))
    special.add_bos = special.bos is not None and special.bos in framed[:1]
    special.add_eos = special.eos is not None and special.eos in framed[-1:]
    return text


def _token_of_id(tokenizer: Tokenizer, token_id: Any) -> str | None:
    if isinstance(token_id, list):
        token_id = token_id[0] if token_id else None
    if not isinstance(token_id, int) or token_id < 0:
        return None
    return tokenizer.id_to_token(token_id)


def _from_tokenizer_model(folder: Path, config: dict[str, Any], special: SpecialTokens) -> str:
    model, bos_id, eos_id = read_sentencepiece_model(folder / "tokenizer.model")
    special.bos = special.bos or (model.pieces[bos_id].text if bos_id is not None else None)
    special.eos = special.eos or (model.pieces[eos_id].text if eos_id is not None else None)
    special.add_bos = _flag(config, "add_bos_token", special.bos is not None) and special.bos is not None
    special.add_eos = _flag(config, "add_eos_token", False) and special.eos is not None
    pieces = _with_added_tokens(list(model.pieces), _added_tokens(folder, config))
    extended = SentencePieceModel(
        pieces=pieces,
        model_type=model.model_type,
        unk_id=model.unk_id,
        add_dummy_prefix=_flag(config, "add_prefix_space", model.add_dummy_prefix),
        remove_extra_whitespaces=model.remove_extra_whitespaces,
        precompiled_charsmap=model.precompiled_charsmap,
    )
    return build_sentencepiece_tokenizer(extended, special, where="tokenizer.model")


def _added_tokens(folder: Path, config: dict[str, Any]) -> dict[int, tuple[str, bool]]:
    """id → (text, special) of tokens that were added to the SentencePiece vocabulary."""
    added: dict[int, tuple[str, bool]] = {}
    for token, token_id in _read_json(folder / "added_tokens.json").items():
        if not isinstance(token_id, int):
            raise CheckpointError(f"added_tokens.json: the id of {token!r} is {token_id!r}, not an integer")
        added[token_id] = (token, True)
    decoder = config.get("added_tokens_decoder") or {}
    if not isinstance(decoder, dict):
        raise CheckpointError(f"{_CONFIG}: added_tokens_decoder is no object")
    for key, entry in decoder.items():
        text = _token_text(entry, f"{_CONFIG}: added_tokens_decoder[{key!r}]")
        if not key.isdecimal() or text is None:
            raise CheckpointError(f"{_CONFIG}: added_tokens_decoder[{key!r}] is not an id with a token")
        added[int(key)] = (text, bool(entry.get("special", False)) if isinstance(entry, dict) else True)
    return added


def _with_added_tokens(pieces: list[Piece], added: dict[int, tuple[str, bool]]) -> list[Piece]:
    for token_id in sorted(added):
        text, is_special = added[token_id]
        piece = Piece(text, 0.0, PieceType.CONTROL if is_special else PieceType.USER_DEFINED)
        if token_id > len(pieces):
            raise CheckpointError(
                f"added token {text!r} has id {token_id}, but the ids before it end at {len(pieces) - 1}; "
                "an added_tokens.json that belongs to another tokenizer.model would do that"
            )
        if token_id == len(pieces):
            pieces.append(piece)
        elif pieces[token_id].type not in (PieceType.CONTROL, PieceType.UNKNOWN, PieceType.USER_DEFINED):
            # transformers lets a config turn any piece into an added token, also under another name.
            pieces[token_id] = piece
    return pieces


def _special_tokens(folder: Path, config: dict[str, Any]) -> SpecialTokens:
    fallback = _read_json(folder / "special_tokens_map.json")

    def find(name: str) -> str | None:
        for source, values in ((_CONFIG, config), ("special_tokens_map.json", fallback)):
            if (text := _token_text(values.get(name), f"{source}: {name}")) is not None:
                return text
        return None

    return SpecialTokens(bos=find("bos_token"), eos=find("eos_token"))


def _token_text(value: Any, where: str) -> str | None:
    """A token as the configs write it: a string, or an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    if value is not None and not isinstance(value, str):
        raise CheckpointError(f"{where} is {value!r}, not a string or an object with `content`")
    return value or None


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return _read_text(path)
    template = config.get("chat_template")
    if template is None:
        template = _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
        if template is None:
            raise CheckpointError(
                f"{_CONFIG}: chat_template is a list without one named 'default'; it has {sorted(map(str, named))}"
            )
    if template is not None and not isinstance(template, str):
        raise CheckpointError(
            f"chat_template is of type {type(template).__name__}, not a string or a list of templates"
        )
    return template or None


def _flag(config: dict[str, Any], key: str, default: bool) -> bool:
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise CheckpointError(f"{_CONFIG}: {key} is {value!r}, not true or false")
    return value


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path.name} is not UTF-8: {error.reason} at byte {error.start}") from None


def _read_json(path: Path) -> dict[str, Any]:
    """The object in `path`; empty where the file is absent."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path.name} holds a {type(value).__name__}, not an object")
    return value
