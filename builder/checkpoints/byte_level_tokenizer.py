"""Byte-level BPE tokenizers (GPT-2's scheme), and the ways in which models cut text before merging.

A GGUF file names its cut by `tokenizer.ggml.pre`. The patterns are those that the models' own tokenizer.json files
publish; where a name stands for several models, the first one to use it decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from aotllm.builder.checkpoints.special_tokenizer_parts import SpecialTokens, finish_tokenizer
from aotllm.errors import CheckpointError, UnsupportedModel


@dataclass(frozen=True)
class PreTokenizer:
    """How text is cut into words before byte-level BPE."""

    splits: tuple[str, ...]
    """Patterns applied one after the other, each to the pieces of the one before; matches and gaps are both kept"""
    ignore_merges: bool = False
    """A word that is a token as a whole is taken as it is"""
    nfc: bool = False
    """Text is brought to Unicode normalization form C first"""
    add_bos: bool = False
    """Default of `tokenizer.ggml.add_bos_token`"""


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _cl100k(digits: str) -> str:
    """The pattern of cl100k_base, with numbers cut by `digits`."""
    return rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*" + _SPACES


def _o200k(contraction: str, digits: str) -> str:
    """The pattern of o200k_base: words also end where an upper-case letter follows a lower-case one."""
    head = r"[^\r\n\p{L}\p{N}]?"
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    words = f"{head}{upper}*{lower}+{contraction}|{head}{upper}+{lower}*{contraction}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*" + _SPACES


_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*" + _SPACES
)
_CJK = "[一-龥\u0800-一가-\ud7ff]+"
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    + _SPACES,
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")
_SEED = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+" + _SPACES
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"

_LLAMA3 = PreTokenizer((_cl100k(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True)
_CL100K_PLAIN = PreTokenizer((_cl100k(r"\p{N}{1,3}"),))
_ONE_DIGIT = PreTokenizer((_cl100k(r"\p{N}"),))
_QWEN2 = PreTokenizer((_cl100k(r"\p{N}"),), nfc=True)
_GPT2_PLAIN = PreTokenizer((_GPT2,))
_GPT2_DIGITS = PreTokenizer((r"\p{N}", _GPT2))
_GPT4O = PreTokenizer((_o200k(_CONTRACTION + "?", r"\p{N}{1,3}"),))
_DEEPSEEK3 = PreTokenizer(_DEEPSEEK_V3)

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    # GGUF files from before the key existed; llama.cpp's own mixture, there is no published tokenizer behind it
    "default": PreTokenizer((r"[\p{P}$+<=>\^~|]+", _GPT2, r"\p{N}+", "[0-9]{3}")),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), _LLAMA3
    ),
    **dict.fromkeys(("smaug-bpe", "dbrx", "glm4", "chatglm-bpe"), _CL100K_PLAIN),
    **dict.fromkeys(("qwen2", "megrez", "kormo"), _QWEN2),
    "qwen35": PreTokenizer((_QWEN35,), nfc=True),
    **dict.fromkeys(("deepseek-r1-qwen", "stablelm2", "hunyuan", "solar-open", "grok-2"), _ONE_DIGIT),
    **dict.fromkeys(("gpt-2", "phi-2", "gigachat", "mellum", "exaone4", "jais", "trillion", "a.x-4.0"), _GPT2_PLAIN),
    **dict.fromkeys(("mpt", "olmo"), PreTokenizer((_GPT2,), nfc=True)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b"), _GPT2_DIGITS),
    "command-r": PreTokenizer((r"\p{N}", _GPT2), nfc=True),
    "tekken": PreTokenizer((_o200k("", r"\p{N}"),), ignore_merges=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _GPT4O),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _DEEPSEEK3),
    "deepseek-coder": PreTokenizer(_DEEPSEEK_CODER),
    "seed-coder": PreTokenizer((_SEED,)),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), PreTokenizer((_BAILING,))),
}
"""By the value of `tokenizer.ggml.pre`"""


def find_pre_tokenizer(name: str, where: str) -> PreTokenizer:
    """The cut called `name`. Raises UnsupportedModel, listing the known ones."""
    try:
        return PRE_TOKENIZERS[name]
    except KeyError:
        raise UnsupportedModel(
            f"{where}: pre-tokenizer {name!r} (tokenizer.ggml.pre) is not known; known are "
            f"{', '.join(sorted(PRE_TOKENIZERS))}. Build from the model's Hugging Face folder instead"
        ) from None


def build_byte_level_tokenizer(
    tokens: Sequence[str],
    merges: Sequence[tuple[str, str]],
    pre: PreTokenizer,
    special: SpecialTokens,
    *,
    where: str,
) -> str:
    """Serialize a byte-level BPE tokenizer.

    Args:
        tokens: by id; ordinary ones in GPT-2's byte alphabet, special ones as they appear in text.
        merges: best first; both parts and their concatenation are tokens.
        pre: how text is cut.
        special: subset of `tokens`.
        where: what the vocabulary was read from, for messages.

    Raises:
        CheckpointError: tokens repeat, or a merge uses a token that does not exist.
    """
    vocab: dict[str, int] = {}
    for index, token in enumerate(tokens):
        other = vocab.setdefault(token, index)
        if other != index:
            raise CheckpointError(f"{where}: tokens {other} and {index} are both {token!r}; tokens must be unique")
    for rank, (left, right) in enumerate(merges):
        for part in (left, right, left + right):
            if part not in vocab:
                raise CheckpointError(f"{where}: merge {rank} ({left!r}, {right!r}) needs {part!r}, which is no token")
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=list(merges), ignore_merges=pre.ignore_merges))
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in pre.splits),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return finish_tokenizer(tokenizer, special, normalize_user_defined=False, where=where)
