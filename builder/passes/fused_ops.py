"""The fused ops, each as the pattern of standard operators that it stands for.

`docs/engine_format.md` gives their meaning. The patterns mirror how `aotllm.builder.graph.ops` emits its nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from aotllm.builder.passes.pattern import Bind, Maybe, OneOf, Op, Pattern

EMBEDDING = "embedding"
NORM_QKV_ROPE = "norm_qkv_rope"
PAGED_ATTENTION = "paged_attention"
LINEAR_RESIDUAL = "linear_residual"
NORM_SWIGLU = "norm_swiglu"
NORM_MOE = "norm_moe"
LM_HEAD = "lm_head"
LAYER_OPS = (NORM_QKV_ROPE, PAGED_ATTENTION, LINEAR_RESIDUAL, NORM_SWIGLU, LINEAR_RESIDUAL)
"""What a layer of a dense decoder consists of, in order"""
SPARSE_LAYER_OPS = (NORM_QKV_ROPE, PAGED_ATTENTION, LINEAR_RESIDUAL, NORM_MOE)
"""What a layer with experts consists of"""


@dataclass(frozen=True)
class FusedOp:
    """A fused op: its pattern, and the order of its operands."""

    name: str
    outputs: tuple[tuple[str, Pattern], ...]
    """Name and pattern of each output"""
    inputs: tuple[str, ...]
    """Names of the border values in order; those that a variant lacks are left out"""
    feeds: str | None = None
    """For an op of several outputs: the fused op whose first inputs they are"""


def _weight(name: str) -> Bind:
    return Bind(name, weight=True)


def _norm(x: Pattern, weight: str, eps: str = "eps") -> Op:
    return Op("RMSNormalization", x, _weight(weight), where={"axis": -1}, capture={"epsilon": eps})


def _linear(x: Pattern, weight: str, bias: str, variant: str = "bias") -> Op:
    return Op("Gemm", x, _weight(weight), Maybe(variant, _weight(bias)), where={"transB": 1})


def _constant(name: str, kind: str) -> Op:
    return Op("Constant", capture={kind: name})


def _axes(*axes: int) -> Op:
    return Op("Constant", where={"value_ints": axes})


def _is_head_shape(shape: tuple[int, ...]) -> bool:
    """`(0, -1, head_dim)`: the last axis split into heads."""
    return len(shape) == 3 and shape[:2] == (0, -1) and shape[2] > 0


_POSITIONS = Bind("positions")


def _add_batch(x: Pattern) -> Op:
    return Op("Unsqueeze", x, _axes(0))


def _drop_batch(x: Pattern) -> Op:
    return Op("Squeeze", x, _axes(0))


def _head_norm(x: Pattern, weight: str) -> Op:
    heads = Op("Reshape", x, Op("Constant", where={"value_ints": _is_head_shape}))
    return Op("Reshape", _norm(heads, weight, "qk_norm_eps"), Op("Constant", where={"value_ints": (0, -1)}))


def _table(function: str) -> Op:
    position = Op("Cast", _POSITIONS, where={"to": ir.DataType.FLOAT})
    column = Op("Unsqueeze", position, _axes(0, 2))
    angles = Op("Mul", column, _weight("inv_freq"))
    return Op("Mul", Op(function, angles), _constant("attention_factor", "value_float"))


def _rotary(x: Pattern, num_heads: str) -> Op:
    capture = {"num_heads": num_heads, "rotary_embedding_dim": "rotary_dim"}
    return _drop_batch(Op("RotaryEmbedding", _add_batch(x), _table("Cos"), _table("Sin"), capture=capture))


def _projection(letter: str) -> Op:
    return _linear(_norm(Bind("x"), "norm"), f"{letter}_weight", f"{letter}_bias", f"{letter}_bias")


def _rotated_head(letter: str, num_heads: str) -> Op:
    projected = _projection(letter)
    normed = _head_norm(projected, f"{letter}_norm")
    return _rotary(OneOf((f"{letter}_norm", normed), ("", projected)), num_heads)


def _mask() -> OneOf:
    query, key = Op("Unsqueeze", _POSITIONS, _axes(1)), Op("Unsqueeze", _POSITIONS, _axes(0))
    causal = Op("LessOrEqual", key, query)
    near = Op("Greater", key, Op("Sub", query, _constant("window", "value_int")))
    return OneOf(("window", Op("And", causal, near)), ("", causal))


def _attention() -> Op:
    capture = {"q_num_heads": "num_heads", "kv_num_heads": "num_kv_heads", "scale": "scale", "softcap": "softcap"}
    q, k, v = (_add_batch(Bind(name)) for name in "qkv")
    return _drop_batch(Op("Attention", q, k, v, _mask(), capture=capture))


def _scaled_embedding() -> OneOf:
    rows = Op("Gather", _weight("weight"), Bind("token_ids"))
    return OneOf(("scale", Op("Mul", rows, _constant("scale", "value_float"))), ("", rows))


def _gate() -> OneOf:
    return _activated(_linear(_norm(Bind("x"), "norm"), "gate_weight", "gate_bias", "gate_bias"))


def _activated(gate: Pattern) -> OneOf:
    return OneOf(("silu", Op("Swish", gate)), ("gelu_tanh", Op("Gelu", gate, where={"approximate": "tanh"})))


def _logits() -> OneOf:
    logits = _linear(_norm(Bind("x"), "norm"), "weight", "bias")
    cap = _constant("softcap", "value_float")
    return OneOf(("softcap", Op("Mul", Op("Tanh", Op("Div", logits, cap)), cap)), ("", logits))


def _residual() -> Op:
    projected = _linear(Bind("x"), "weight", "bias")
    return Op("Add", Bind("residual"), OneOf(("post_norm", _norm(projected, "post_norm")), ("", projected)))


def _routing() -> Op:
    logits = Op("Gemm", _norm(Bind("x"), "norm"), _weight("router"), where={"transB": 1})
    probabilities = Op("Softmax", logits, where={"axis": -1})

    def top_k(output: int) -> Op:
        where = {"axis": -1, "largest": 1, "sorted": 1}
        return Op("TopK", probabilities, _constant("top_k", "value_ints"), where=where, output=output, outputs=2)

    total = Op("ReduceSum", top_k(0), _axes(-1), where={"keepdims": 1})
    weights = OneOf(("normalized", Op("Div", top_k(0), total)), ("", top_k(0)))
    zeros = Op("Sub", probabilities, probabilities)
    return Op("ScatterElements", zeros, top_k(1), weights, where={"axis": -1})


def _experts() -> Op:
    def rise(part: str) -> Op:
        x = _norm(Bind("x"), "norm")
        return Op("Einsum", x, _weight(f"{part}_weight"), where={"equation": "th,eih->tei"})

    h = Op("Mul", _activated(rise("gate")), rise("up"))
    outputs = Op("Einsum", h, _weight("down_weight"), where={"equation": "tei,ehi->teh"})
    total = Op("Einsum", _routing(), outputs, where={"equation": "te,teh->th"})
    return Op("Add", Bind("x"), total)


FUSED_OPS: tuple[FusedOp, ...] = (
    FusedOp(EMBEDDING, (("y", _scaled_embedding()),), ("token_ids", "weight")),
    FusedOp(PAGED_ATTENTION, (("y", _attention()),), ("q", "k", "v", "positions")),
    FusedOp(
        NORM_QKV_ROPE,
        (
            ("q", _rotated_head("q", "num_heads")),
            ("k", _rotated_head("k", "num_kv_heads")),
            ("v", _projection("v")),
        ),
        (
            *("x", "positions", "norm", "q_weight", "k_weight", "v_weight", "q_bias", "k_bias", "v_bias"),
            *("q_norm", "k_norm", "inv_freq"),
        ),
        feeds=PAGED_ATTENTION,
    ),
    FusedOp(
        NORM_SWIGLU,
        (("y", Op("Mul", _gate(), _linear(_norm(Bind("x"), "norm"), "up_weight", "up_bias", "up_bias"))),),
        ("x", "norm", "gate_weight", "up_weight", "gate_bias", "up_bias"),
    ),
    FusedOp(
        NORM_MOE,
        (("y", _experts()),),
        ("x", "norm", "router", "gate_weight", "up_weight", "down_weight"),
    ),
    FusedOp(LINEAR_RESIDUAL, (("y", _residual()),), ("x", "residual", "weight", "bias", "post_norm")),
    FusedOp(LM_HEAD, (("logits", _logits()),), ("x", "norm", "weight", "bias")),
)
"""In the order in which they are looked for: an op that `feeds` another comes after it, and `lm_head`, whose pattern is
part of others, last"""
