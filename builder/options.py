"""`BuildOptions`: what a build may choose. Field docs are the help texts of `aotllm build`."""

from __future__ import annotations

from dataclasses import dataclass, fields

from aotllm.errors import InvalidRequest, UnsupportedModel

TARGETS = ("cpu", "cuda", "tensorrt", "tensorrt-rtx")
DTYPES = ("auto", "f32", "f16", "bf16")
KV_CACHE_DTYPES = ("auto", "f32", "f16", "int8")


@dataclass(frozen=True)
class BuildOptions:
    """Options of one build."""

    target: str = "cpu"
    """Where the engine shall run"""
    dtype: str = "auto"
    """Type of weights that the checkpoint stores as floats; auto = as stored. Block-quantized weights stay so"""
    kv_cache_dtype: str = "auto"
    """Type of the KV cache; auto = f32 for float32 engines, else f16. int8 takes about half of f16's memory"""
    max_batch_size: int = 64
    """Most sequences in one step"""
    max_seq_len: int | None = None
    """Longest sequence, prompt and answer, in tokens; default: the checkpoint's"""
    max_num_tokens: int = 512
    """Most tokens in one step over all sequences; longer prompts run in chunks"""
    tokens_per_block: int = 16
    """Tokens of a KV block; a multiple of 16"""
    quantize: str | None = None
    """Quantize float weights: none available for this target yet"""
    tp: int = 1
    """Tensor-parallel ranks"""
    pp: int = 1
    """Pipeline-parallel stages"""
    force: bool = False
    """Replace an engine that is already at the output path"""

    def validate(self) -> None:
        """Raises InvalidRequest for a value out of range, UnsupportedModel for one that no code serves yet."""
        _one_of("target", self.target, TARGETS)
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        for name in ("max_batch_size", "max_num_tokens", "tokens_per_block", "tp", "pp"):
            _positive(name, getattr(self, name))
        if self.max_seq_len is not None:
            _positive("max_seq_len", self.max_seq_len)
        if self.tokens_per_block % 16:
            raise InvalidRequest(
                f"tokens_per_block: got {self.tokens_per_block}, expected a multiple of 16", "tokens_per_block"
            )
        if self.max_num_tokens < self.max_batch_size:
            raise InvalidRequest(
                f"max_num_tokens: got {self.max_num_tokens}, expected at least max_batch_size "
                f"({self.max_batch_size}): each running sequence takes one token per step",
                "max_num_tokens",
            )
        if self.target != "cpu":
            raise UnsupportedModel(f"target {self.target!r} is not implemented in this version; available: cpu")
        if (self.tp, self.pp) != (1, 1):
            raise UnsupportedModel(f"tp={self.tp}, pp={self.pp}: the cpu target of this version builds one rank only")
        if self.quantize is not None:
            raise UnsupportedModel(
                f"quantize={self.quantize!r} is not implemented for the cpu target in this version; "
                "a GGUF checkpoint that is already quantized keeps its precision"
            )

    def flags(self) -> tuple[str, ...]:
        """The command-line flags that say what differs from the defaults."""
        changed = [(f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default]
        return tuple(
            f"--{name.replace('_', '-')} {value}" for name, value in changed if name != "force" and value is not None
        )


def _one_of(name: str, got: str, allowed: tuple[str, ...]) -> None:
    if got not in allowed:
        raise InvalidRequest(f"{name}: got {got!r}, expected one of {', '.join(allowed)}", name)


def _positive(name: str, got: int) -> None:
    if not 0 < got < 2**31:
        raise InvalidRequest(f"{name}: got {got}, expected a positive integer below 2**31", name)
