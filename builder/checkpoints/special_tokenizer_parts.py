"""What byte-level and SentencePiece tokenizers share: added tokens, the BOS/EOS template, serialization."""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenizers import AddedToken, Tokenizer
from tokenizers.processors import TemplateProcessing

from aotllm.errors import CheckpointError


@dataclass
class SpecialTokens:
    """The tokens of a vocabulary that are more than text, and which of them frame a raw prompt."""

    control: list[str] = field(default_factory=list)
    """Recognized whole in text and hidden by `skip_special_tokens` (`<|im_end|>`, `<s>`)"""
    user_defined: list[str] = field(default_factory=list)
    """Recognized whole in text, but shown (`<tool_call>`, runs of spaces)"""
    bos: str | None = None
    eos: str | None = None
    add_bos: bool = False
    add_eos: bool = False


def finish_tokenizer(tokenizer: Tokenizer, special: SpecialTokens, *, normalize_user_defined: bool, where: str) -> str:
    """Register the special tokens, add the BOS/EOS template and serialize.

    Args:
        tokenizer: model, normalizer, pre-tokenizer and decoder are set; its vocabulary holds every special token.
        special: tokens to register.
        normalize_user_defined: match user-defined tokens in normalized text (SentencePiece), not in the raw one.
        where: what the tokenizer was read from, for messages.

    Raises:
        CheckpointError: BOS or EOS is to be added, but the checkpoint does not say which token that is.
    """
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special.control])
    tokenizer.add_tokens(
        [AddedToken(t, special=False, normalized=normalize_user_defined) for t in special.user_defined]
    )
    if tokenizer.get_vocab_size(with_added_tokens=True) != size:
        raise CheckpointError(f"{where}: special tokens are not in the vocabulary; the file contradicts itself")
    if special.add_bos or special.add_eos:
        _set_bos_eos_template(tokenizer, special, where)
    return str(tokenizer.to_str())


def _set_bos_eos_template(tokenizer: Tokenizer, special: SpecialTokens, where: str) -> None:
    """Make `encode(add_special_tokens=True)` put BOS before and EOS after the text, as `special` says."""
    frame = []
    for wanted, token, name in ((special.add_bos, special.bos, "bos"), (special.add_eos, special.eos, "eos")):
        if not wanted:
            continue
        token_id = tokenizer.token_to_id(token) if token is not None else None
        if token_id is None:
            raise CheckpointError(
                f"{where}: add_{name}_token is true, but the {name} token {token!r} is not in the vocabulary; "
                f"set the {name} token or turn add_{name}_token off"
            )
        # Pieces of the template are labels: a token's own text may hold the template's `:` and `$`.
        frame.append({"id": name, "ids": [token_id], "tokens": [token]})
    before = ["bos"] if special.add_bos else []
    after = ["eos"] if special.add_eos else []
    second = [f"{label}:1" for label in before], [f"{label}:1" for label in after]
    tokenizer.post_processor = TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *second[0], "$B:1", *second[1]],
        special_tokens=frame,
    )
