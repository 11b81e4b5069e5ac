"""The functional op set that model definitions are written in.

Activations are float32 `[tokens, width]` between ops, whatever shapes an op uses inside. Every op is standard ONNX, so
that the traced graph runs in onnxruntime as it is. Its nodes are emitted in one fixed form, which the patterns of
`aotllm.builder.passes.fused_ops` rely on.
"""

from __future__ import annotations

import onnx_ir as ir

from aotllm.builder.graph.tracer import TOKENS, Tensor

ACTIVATIONS = ("silu", "gelu_tanh")
"""What `gated` knows"""


def embedding(token_ids: Tensor, table: Tensor, scale: float = 1.0) -> Tensor:
    """Rows of `table` `[vocab_size, width]`, times `scale`: `[tokens]` int64 → `[tokens, width]`."""
    shape = (TOKENS, table.width)
    rows = table.tracer.emit("Gather", table, token_ids, shape=shape, name=_owner(table))
    if scale == 1.0:
        return rows
    return rows.tracer.emit("Mul", rows, rows.tracer.constant(float(scale)), shape=shape)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x · weightᵀ + bias`: `[tokens, k]`, `[n, k]`, `[n]` → `[tokens, n]`."""
    inputs = (x, weight) if bias is None else (x, weight, bias)
    n = weight.shape[0]
    return x.tracer.emit("Gemm", *inputs, shape=(TOKENS, n), attributes={"transB": 1}, name=_owner(weight))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`weight ⊙ x / sqrt(mean(x²) + eps)` over the last axis (arXiv 1910.07467); any shape."""
    attributes = {"axis": -1, "epsilon": float(eps)}
    return x.tracer.emit("RMSNormalization", x, weight, shape=x.shape, attributes=attributes, name=_owner(weight))


def head_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of each head by itself: `[tokens, heads · head_dim]`, `weight` `[head_dim]`."""
    tracer, head_dim = x.tracer, weight.width
    heads = tracer.emit("Reshape", x, tracer.constant((0, -1, head_dim)), shape=(TOKENS, x.width // head_dim, head_dim))
    return tracer.emit("Reshape", rms_norm(heads, weight, eps), tracer.constant((0, -1)), shape=(TOKENS, x.width))


def rotary_tables(positions: Tensor, inv_freq: Tensor, attention_factor: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine `[1, tokens, rotary_dim / 2]` of `position · inv_freq`, times `attention_factor`.

    Args:
        positions: int64 `[tokens]`.
        inv_freq: float32 `[rotary_dim / 2]`.
        attention_factor: 1 except for YaRN and LongRoPE.
    """
    tracer, half = positions.tracer, inv_freq.width
    shape = (1, TOKENS, half)
    position = tracer.emit("Cast", positions, shape=(TOKENS,), attributes={"to": ir.DataType.FLOAT.value})
    column = tracer.emit("Unsqueeze", position, tracer.constant((0, 2)), shape=(1, TOKENS, 1))
    angles = tracer.emit("Mul", column, inv_freq, shape=shape)
    factor = tracer.constant(float(attention_factor))
    cos = tracer.emit("Mul", tracer.emit("Cos", angles, shape=shape), factor, shape=shape)
    sin = tracer.emit("Mul", tracer.emit("Sin", angles, shape=shape), factor, shape=shape)
    return cos, sin


def rotary(x: Tensor, tables: tuple[Tensor, Tensor], num_heads: int) -> Tensor:
    """Rotate-half RoPE of the first dimensions of each head: `[tokens, num_heads · head_dim]` → same shape.

    `tables` come from `rotary_tables`; twice their width is the number of dimensions that rotate.
    """
    tracer, (cos, sin) = x.tracer, tables
    attributes = {"num_heads": num_heads, "rotary_embedding_dim": 2 * cos.width}
    batched = _add_batch(x)
    rotated = tracer.emit("RotaryEmbedding", batched, cos, sin, shape=batched.shape, attributes=attributes)
    return _drop_batch(rotated)


def attention_mask(positions: Tensor, window: int = 0) -> Tensor:
    """Who sees whom: bool `[tokens, tokens]` (query, key).

    A key is seen from its own position on; with a `window` only by the `window - 1` queries after it, too.
    """
    tracer, shape, boolean = positions.tracer, (TOKENS, TOKENS), ir.DataType.BOOL
    query = tracer.emit("Unsqueeze", positions, tracer.constant((1,)), shape=(TOKENS, 1), dtype=ir.DataType.INT64)
    key = tracer.emit("Unsqueeze", positions, tracer.constant((0,)), shape=(1, TOKENS), dtype=ir.DataType.INT64)
    causal = tracer.emit("LessOrEqual", key, query, shape=shape, dtype=boolean)
    if not window:
        return causal
    horizon = tracer.emit("Sub", query, tracer.constant(window), shape=(TOKENS, 1), dtype=ir.DataType.INT64)
    near = tracer.emit("Greater", key, horizon, shape=shape, dtype=boolean)
    return tracer.emit("And", causal, near, shape=shape, dtype=boolean)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    softcap: float = 0.0,
) -> Tensor:
    """Grouped-query attention of one sequence.

    `softmax(cap(scale · q · kᵀ))` over the keys that `mask` allows, times v, with
    `cap(s) = softcap · tanh(s / softcap)` where `softcap` > 0.

    Args:
        query: `[tokens, num_heads · head_dim]`.
        key: `[tokens, num_kv_heads · head_dim]`; `value` likewise.
        mask: bool `[tokens, tokens]`.
        num_heads: a multiple of `num_kv_heads`.
        num_kv_heads: heads that K and V have; each serves `num_heads / num_kv_heads` query heads.
        scale: factor on the scores.
        softcap: 0 = off.
    """
    attributes = {
        "q_num_heads": num_heads,
        "kv_num_heads": num_kv_heads,
        "scale": float(scale),
        "softcap": float(softcap),
    }
    q, k, v = _add_batch(query), _add_batch(key), _add_batch(value)
    return _drop_batch(query.tracer.emit("Attention", q, k, v, mask, shape=q.shape, attributes=attributes))


def add(a: Tensor, b: Tensor) -> Tensor:
    """Elementwise sum of two tensors of one shape."""
    return a.tracer.emit("Add", a, b, shape=a.shape)


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """`act(gate) ⊙ up`: SwiGLU for `silu`, GeGLU for `gelu_tanh` (arXiv 2002.05202)."""
    assert activation in ACTIVATIONS, f"activation {activation!r}; known: {', '.join(ACTIVATIONS)}"
    tracer = gate.tracer
    if activation == "silu":
        activated = tracer.emit("Swish", gate, shape=gate.shape)
    else:
        activated = tracer.emit("Gelu", gate, shape=gate.shape, attributes={"approximate": "tanh"})
    return tracer.emit("Mul", activated, up, shape=gate.shape)


def mixture_of_experts(
    x: Tensor,
    router: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    *,
    top_k: int,
    normalize: bool,
    activation: str,
) -> Tensor:
    """A weighted sum of a token's `top_k` gated MLPs out of `experts` (arXiv 1701.06538, 2401.04088).

    `p = softmax(router · x)` over all experts; the `top_k` largest, the lower index of equal ones, are the weights of
    those experts and divided by their sum where `normalize` says so. Every expert is computed for every token here, and
    those that were not chosen have weight 0: right for a reference, not meant to be fast.

    Args:
        x: `[tokens, width]`.
        router: `[experts, width]`.
        gate: `[experts, neurons, width]`; `up` likewise.
        up: see `gate`.
        down: `[experts, width, neurons]`.
        top_k: 1 … experts.
        normalize: divide the weights by their sum.
        activation: of `ACTIVATIONS`.

    Returns:
        `[tokens, width]`.
    """
    tracer, (experts, neurons, width) = x.tracer, gate.shape
    weights = _routing(linear(x, router), top_k, normalize)
    shape = (TOKENS, experts, neurons)
    rise = {"equation": "th,eih->tei"}
    gates = tracer.emit("Einsum", x, gate, shape=shape, attributes=rise, name=_owner(gate))
    ups = tracer.emit("Einsum", x, up, shape=shape, attributes=rise, name=_owner(up))
    h = gated(gates, ups, activation)
    fall, total = {"equation": "tei,ehi->teh"}, {"equation": "te,teh->th"}
    outputs = tracer.emit("Einsum", h, down, shape=(TOKENS, experts, width), attributes=fall, name=_owner(down))
    return tracer.emit("Einsum", weights, outputs, shape=x.shape, attributes=total)


def _routing(logits: Tensor, top_k: int, normalize: bool) -> Tensor:
    """Weights `[tokens, experts]` of all experts, 0 for those that are not among the `top_k`."""
    tracer, last = logits.tracer, {"axis": -1}
    probabilities = tracer.emit("Softmax", logits, shape=logits.shape, attributes=last)
    largest = {"axis": -1, "largest": 1, "sorted": 1}
    chosen_shape, types = (TOKENS, top_k), (ir.DataType.FLOAT, ir.DataType.INT64)
    chosen, index = tracer.emit_all(
        "TopK", probabilities, tracer.constant((top_k,)), shape=chosen_shape, dtypes=types, attributes=largest
    )
    if normalize:
        total = tracer.emit("ReduceSum", chosen, tracer.constant((-1,)), shape=(TOKENS, 1), attributes={"keepdims": 1})
        chosen = tracer.emit("Div", chosen, total, shape=chosen_shape)
    zeros = tracer.emit("Sub", probabilities, probabilities, shape=logits.shape)
    return tracer.emit("ScatterElements", zeros, index, chosen, shape=logits.shape, attributes=last)


def softcap(x: Tensor, cap: float) -> Tensor:
    """`cap · tanh(x / cap)`, elementwise; `cap` > 0."""
    tracer = x.tracer
    limit = tracer.constant(float(cap))
    bounded = tracer.emit("Tanh", tracer.emit("Div", x, limit, shape=x.shape), shape=x.shape)
    return tracer.emit("Mul", bounded, limit, shape=x.shape)


def _add_batch(x: Tensor) -> Tensor:
    """`[tokens, width]` → `[1, tokens, width]`, as RotaryEmbedding and Attention want it."""
    return x.tracer.emit("Unsqueeze", x, x.tracer.constant((0,)), shape=(1, *x.shape))


def _drop_batch(x: Tensor) -> Tensor:
    return x.tracer.emit("Squeeze", x, x.tracer.constant((0,)), shape=x.shape[1:])


def _owner(weight: Tensor) -> str:
    """Nodes are named after the module of their weight: `model.norm.weight` → `model.norm`."""
    return str(weight.value.name).removesuffix(".weight")
