"""Each functional op, run by onnxruntime, against its formula in numpy."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from aotllm.builder.graph import Tracer, ops
from aotllm.builder.graph.tracer import TOKENS
from tests.builder.fakes import run_onnx

RNG = np.random.default_rng(0)
TOKEN_COUNTS = (1, 7)


def random(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def run(op, *arrays: np.ndarray) -> np.ndarray:
    """`op` applied to inputs whose first axis is dynamic where it is not 1-D float (a weight)."""
    tracer = Tracer("test")
    inputs = []
    for i, array in enumerate(arrays):
        is_activation = array.ndim > 1 or array.dtype == np.int64
        shape = (TOKENS, *array.shape[1:]) if is_activation else array.shape
        inputs.append(tracer.input(f"x{i}", shape, ir.DataType.from_numpy(array.dtype)))
    result = op(*inputs)
    outputs = result if isinstance(result, tuple) else (result,)
    model = tracer.finish({f"y{i}": output for i, output in enumerate(outputs)}, {})
    results = run_onnx(model, {f"x{i}": array for i, array in enumerate(arrays)})
    for output, array in zip(outputs, results, strict=True):
        assert array.shape == tuple(array.shape[i] if d == TOKENS else d for i, d in enumerate(output.shape))
    return results if isinstance(result, tuple) else results[0]


def weight(tracer: Tracer, array: np.ndarray, name: str = "w.weight"):
    return tracer.initializer(ir.Tensor(array, name=name))


@pytest.mark.parametrize("tokens", TOKEN_COUNTS)
@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_embedding(tokens, scale):
    table, ids = random(11, 4), RNG.integers(0, 11, tokens)
    actual = run(lambda ids: ops.embedding(ids, weight(ids.tracer, table), scale), ids)
    np.testing.assert_array_equal(actual, table[ids] * np.float32(scale))


@pytest.mark.parametrize("tokens", TOKEN_COUNTS)
@pytest.mark.parametrize("bias", [None, random(3)])
def test_linear(tokens, bias):
    x, w = random(tokens, 5), random(3, 5)

    def op(x):
        return ops.linear(x, weight(x.tracer, w), None if bias is None else weight(x.tracer, bias, "b"))

    np.testing.assert_allclose(run(op, x), x @ w.T + (0 if bias is None else bias), rtol=1e-5, atol=1e-6)


def test_rms_norm():
    x, w = random(7, 6), random(6)
    expected = w * x / np.sqrt((x**2).mean(-1, keepdims=True) + 0.1)
    actual = run(lambda x: ops.rms_norm(x, weight(x.tracer, w), 0.1), x)
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


def test_head_rms_norm():
    x, w = random(7, 12), random(4)
    heads = x.reshape(7, 3, 4)
    expected = w * heads / np.sqrt((heads**2).mean(-1, keepdims=True) + 0.1)
    actual = run(lambda x: ops.head_rms_norm(x, weight(x.tracer, w), 0.1), x)
    np.testing.assert_allclose(actual, expected.reshape(7, 12), rtol=1e-5)


@pytest.mark.parametrize("rotary_dim", [8, 4])
@pytest.mark.parametrize("factor", [1.0, 1.25])
def test_rotary_turns_pairs_by_position_times_frequency(rotary_dim, factor):
    """As multiplication of complex numbers: dimension i is the real part, i + rotary_dim / 2 the imaginary one."""
    x, positions, half = random(5, 3 * 8), np.array([0, 1, 2, 10, 1000]), rotary_dim // 2
    inv_freq = random(half) ** 2

    def op(x, positions):
        tables = ops.rotary_tables(positions, weight(x.tracer, inv_freq, "inv_freq"), factor)
        return ops.rotary(x, tables, num_heads=3)

    heads = x.reshape(5, 3, 8).astype(np.float64)
    angles = (positions[:, None].astype(np.float32) * inv_freq).astype(np.float64)[:, None]
    turned = (heads[..., :half] + 1j * heads[..., half:rotary_dim]) * np.exp(1j * angles) * factor
    expected = np.concatenate([turned.real, turned.imag, heads[..., rotary_dim:]], axis=-1).reshape(5, 24)
    np.testing.assert_allclose(run(op, x, positions), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("start", [0, 100])
@pytest.mark.parametrize(
    ("window", "expected"),
    [
        (0, ["1...", "11..", "111.", "1111"]),
        (1, ["1...", ".1..", "..1.", "...1"]),
        (2, ["1...", "11..", ".11.", "..11"]),
        (4, ["1...", "11..", "111.", "1111"]),
        (99, ["1...", "11..", "111.", "1111"]),
    ],
)
def test_attention_mask(start, window, expected):
    mask = run(lambda positions: ops.attention_mask(positions, window), start + np.arange(4))
    assert ["".join(".1"[int(seen)] for seen in row) for row in mask] == expected


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_attention(num_kv_heads, softcap):
    tokens, num_heads, dim, scale = 6, 4, 8, 0.3
    q, k, v = random(tokens, num_heads * dim), random(tokens, num_kv_heads * dim), random(tokens, num_kv_heads * dim)

    def op(q, k, v, positions):
        mask = ops.attention_mask(positions, 3)
        heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
        return ops.attention(q, k, v, mask, **heads, scale=scale, softcap=softcap)

    expected = np.zeros((tokens, num_heads, dim))
    for token in range(tokens):
        for head in range(num_heads):
            group = slice(head * num_kv_heads // num_heads * dim, (head * num_kv_heads // num_heads + 1) * dim)
            keys = range(max(0, token - 2), token + 1)
            scores = np.array([q[token, head * dim : (head + 1) * dim] @ k[key, group] * scale for key in keys])
            scores = softcap * np.tanh(scores / softcap) if softcap else scores
            weights = np.exp(scores) / np.exp(scores).sum()
            expected[token, head] = sum(w * v[key, group] for w, key in zip(weights, keys, strict=True))
    actual = run(op, q, k, v, np.arange(tokens))
    np.testing.assert_allclose(actual, expected.reshape(tokens, -1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("activation", "act"),
    [
        ("silu", lambda x: x / (1 + np.exp(-x))),
        ("gelu_tanh", lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))),
    ],
)
def test_gated(activation, act):
    gate, up = random(7, 6) * 3, random(7, 6)
    actual = run(lambda gate, up: ops.gated(gate, up, activation), gate, up)
    np.testing.assert_allclose(actual, act(gate) * up, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("tokens", TOKEN_COUNTS)
@pytest.mark.parametrize(("top_k", "normalize"), [(1, False), (2, True), (3, False), (4, True)])
def test_mixture_of_experts(tokens, top_k, normalize):
    x, router, gate, up, down = random(tokens, 6), random(4, 6), random(4, 5, 6), random(4, 5, 6), random(4, 6, 5)

    def op(x):
        weights = [weight(x.tracer, w, f"w{i}.weight") for i, w in enumerate((router, gate, up, down))]
        return ops.mixture_of_experts(x, *weights, top_k=top_k, normalize=normalize, activation="silu")

    expected = np.zeros((tokens, 6))
    for token, h in enumerate(x.astype(np.float64)):
        odds = np.exp(router @ h)
        chosen = np.argsort(-odds)[:top_k]
        for expert in chosen:
            g = gate[expert] @ h
            y = down[expert] @ (g / (1 + np.exp(-g)) * (up[expert] @ h))
            expected[token] += odds[expert] / odds[chosen if normalize else slice(None)].sum() * y
    np.testing.assert_allclose(run(op, x), expected, rtol=1e-4, atol=1e-5)


def test_of_experts_with_equal_logits_the_first_are_taken():
    x, gate = random(3, 6), random(4, 5, 6)

    def op(x):
        router = weight(x.tracer, np.zeros((4, 6), np.float32), "router.weight")
        experts = (weight(x.tracer, w, f"w{i}.weight") for i, w in enumerate((gate, gate, only_first)))
        return ops.mixture_of_experts(x, router, *experts, top_k=1, normalize=True, activation="silu")

    only_first = random(4, 6, 5)
    only_first[0] = 0
    np.testing.assert_array_equal(run(op, x), np.zeros((3, 6)))


def test_softcap():
    x = random(7, 6) * 10
    np.testing.assert_allclose(run(lambda x: ops.softcap(x, 4.0), x), 4 * np.tanh(x / 4), rtol=1e-5)


def test_add():
    a, b = random(7, 6), random(7, 6)
    np.testing.assert_array_equal(run(ops.add, a, b), a + b)
