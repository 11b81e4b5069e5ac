"""`config.json` → `RopeConfig`, in both spellings.

transformers 5 writes `rope_parameters`: one object, or one per layer type. Older files write `rope_theta` next to an
optional `rope_scaling` whose kind is under `rope_type` or, older still, `type`; Gemma 3 adds `rope_local_base_freq`.
"""

from __future__ import annotations

from aotllm.builder.checkpoints.fields import Fields
from aotllm.builder.checkpoints.validate import ROPE_TYPES
from aotllm.builder.config import RopeConfig
from aotllm.errors import CheckpointError, UnsupportedModel

_DEFAULT_THETA = 10_000.0
_GEMMA3_GLOBAL_THETA = 1_000_000.0
_MIXTRAL_THETA = 1_000_000.0
_LAYER_TYPES = ("full_attention", "sliding_attention")


def read_rope(
    config: Fields, architecture: str, head_dim: int, max_positions: int
) -> tuple[RopeConfig, RopeConfig | None]:
    """RoPE of the full-attention layers, and that of the sliding-window layers where it is another one.

    `max_positions` stands in for an `original_max_position_embeddings` that the file does not state.

    Raises:
        CheckpointError: a parameter is missing or out of range.
        UnsupportedModel: a RoPE type that is not implemented.
    """
    parameters = config.child("rope_scaling") or config.child("rope_parameters")
    nested = parameters is not None and any(name in parameters for name in _LAYER_TYPES)
    if architecture == "gemma3":
        if parameters is not None and not nested and not config.states("rope_scaling"):
            raise CheckpointError(
                f"{config.source}: field 'rope_parameters' of a Gemma 3 model needs one object for each of "
                f"{' and '.join(_LAYER_TYPES)}"
            )
        theta = config.number("rope_theta", _GEMMA3_GLOBAL_THETA)
        local_theta = config.number("rope_local_base_freq", _DEFAULT_THETA)
    else:
        theta = local_theta = config.number(
            "rope_theta", _MIXTRAL_THETA if architecture == "mixtral" else _DEFAULT_THETA
        )
    full, local = parameters, None  # a `rope_scaling` of Gemma 3 concerns the full-attention layers only
    if nested:
        assert parameters is not None
        full, local = parameters.child("full_attention"), parameters.child("sliding_attention")
    rope = _read_one(config, full, head_dim, max_positions, theta)
    if architecture != "gemma3" and not nested:
        return rope, None
    rope_local = _read_one(config, local, head_dim, max_positions, local_theta)
    return rope, rope_local if rope_local != rope else None


def _read_one(config: Fields, parameters: Fields | None, head_dim: int, max_positions: int, theta: float) -> RopeConfig:
    """One set of parameters; `theta` is for sets that do not state their own."""
    own = parameters if parameters is not None else Fields(config.source, {})
    rope_type = own.string("rope_type", None) or own.string("type", "default")
    if rope_type not in ROPE_TYPES:
        raise UnsupportedModel(
            f"{config.source}: RoPE type '{rope_type}' is not implemented; known are {', '.join(ROPE_TYPES)}"
        )
    original = None
    if rope_type in ("llama3", "yarn", "longrope"):
        # A value outside of the RoPE parameters (Phi-3 style) wins over one inside.
        original = config.integer("original_max_position_embeddings", None)
        original = original or own.integer("original_max_position_embeddings", max_positions)
    elif rope_type == "dynamic":
        original = max_positions
    if rope_type in ("yarn", "longrope"):
        factor = own.number("factor", max_positions / (original or max_positions))
    elif rope_type == "default":
        factor = 1.0
    else:
        factor = own.number("factor")
    rotary_dim = int(head_dim * _partial_rotary_factor(config, own))
    return RopeConfig(
        rope_type=rope_type,
        theta=own.number("rope_theta", theta),
        factor=factor,
        original_max_position_embeddings=original,
        low_freq_factor=own.number("low_freq_factor") if rope_type == "llama3" else None,
        high_freq_factor=own.number("high_freq_factor") if rope_type == "llama3" else None,
        beta_fast=own.number("beta_fast", None) if rope_type == "yarn" else None,
        beta_slow=own.number("beta_slow", None) if rope_type == "yarn" else None,
        mscale=own.number("mscale", None, positive=False) if rope_type == "yarn" else None,
        mscale_all_dim=own.number("mscale_all_dim", None, positive=False) if rope_type == "yarn" else None,
        attention_factor=own.number("attention_factor", None) if rope_type in ("yarn", "longrope") else None,
        truncate=own.boolean("truncate", True),
        short_factor=own.numbers("short_factor") if rope_type == "longrope" else None,
        long_factor=own.numbers("long_factor") if rope_type == "longrope" else None,
        rotary_dim=rotary_dim if rotary_dim != head_dim else None,
    )


def _partial_rotary_factor(config: Fields, own: Fields) -> float:
    name = "partial_rotary_factor"
    holder = own if name in own else config
    factor: float = holder.number(name, 1.0)
    if factor > 1:
        holder.fail(name, "a number above 0 and up to 1")
    return factor
