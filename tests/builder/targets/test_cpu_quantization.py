"""`--quantize` on target cpu: what a group loses, what becomes of which matrix, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import gguf
import numpy as np
import pytest
from gguf import quants
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aotllm.builder.options import BuildOptions
from aotllm.builder.targets.cpu.packing import pack_quantized, quantized_format, segment_nbytes, unpack_segment
from aotllm.builder.targets.cpu.packing_formats import BLOCK_FORMATS
from aotllm.builder.targets.cpu.target import compile_cpu
from aotllm.errors import CheckpointError, UnsupportedModel
from tests.builder.fakes import CONFIGS, MemoryCheckpoint, random_checkpoint
from tests.builder.targets.test_cpu_ranks import tensors_of

LIMITS = {"max_seq_len": 64, "max_num_tokens": 40, "max_batch_size": 4, "tokens_per_block": 16}
SIZES = {"num_heads": 4, "num_kv_heads": 4, "head_dim": 32, "hidden_size": 128, "intermediate_size": 160}
INT4 = [(32, True), (32, False), (64, True), (64, False), (128, True), (128, False)]
FORMATS = ["q8_0", *(quantized_format("int4", group, symmetric) for group, symmetric in INT4)]

sample = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.differing_executors])


def weights(n, k, seed, spread):
    """Rows of very different sizes, some values far out, some rows of zeros or of one value."""
    rng = np.random.default_rng(seed)
    values = rng.standard_t(3, (n, k)) * 10.0 ** rng.uniform(-spread, spread, (n, 1))
    values[rng.random(n) < 0.1] = 0
    values[rng.random(n) < 0.1] = 0.375
    return values.astype(np.float32)


def requantized(values, fmt):
    n, k = values.shape
    packed = pack_quantized(values, "w", fmt)
    assert packed.nbytes == segment_nbytes(fmt, n, k)
    return unpack_segment(packed, fmt, n, k)


def groups_of(values, group):
    """Groups of columns, the last of each row perhaps shorter: filled with zeros."""
    n, k = values.shape
    return np.pad(values, ((0, 0), (0, -k % group))).reshape(n, -1, group)


def importance(values, group):
    """Magnitude and the root mean square of the group; columns that a shorter last group lacks do not count."""
    groups, columns = groups_of(values, group), groups_of(np.ones_like(values), group).sum(axis=2, keepdims=True)
    return np.abs(groups) + np.sqrt((groups**2).sum(axis=2, keepdims=True) / columns)


def plainly_rounded(values, fmt):
    """The whole range of each group, float16 scales, nearest codes: what everybody's simplest quantizer does."""
    f = BLOCK_FORMATS[fmt]
    groups = groups_of(values, f.span).astype(np.float64)
    if f.affine:
        # Of a shorter last group only its own columns count.
        columns = groups_of(np.ones_like(values), f.span) > 0
        low = np.where(columns, groups, np.inf).min(axis=2, keepdims=True)
        high = np.where(columns, groups, -np.inf).max(axis=2, keepdims=True)
        scale = ((high - low) / 15).astype(np.float32).astype(np.float16).astype(np.float64)
        low = low.astype(np.float16).astype(np.float64)
        codes = np.clip(np.rint((groups - low) / np.where(scale > 0, scale, 1)), 0, 15)
        return (codes * scale + low).reshape(len(values), -1)[:, : values.shape[1]]
    extreme = np.take_along_axis(groups, np.abs(groups).argmax(axis=2)[..., None], axis=2)
    scale = (np.abs(extreme) / 127 if f.bits == 8 else extreme / -8).astype(np.float16).astype(np.float64)
    levels = (-127, 127) if f.bits == 8 else (-8, 7)
    codes = np.clip(np.rint(groups / np.where(scale != 0, scale, 1)), *levels)
    return (codes * scale).reshape(len(values), -1)[:, : values.shape[1]]


@pytest.mark.parametrize("fmt", FORMATS)
@sample
@given(n=st.integers(1, 20), blocks=st.integers(1, 7), seed=st.integers(0, 2**32 - 1))
def test_no_group_is_further_off_than_by_plain_rounding(fmt, n, blocks, seed):
    values = weights(n, 32 * blocks, seed, spread=2)
    span = BLOCK_FORMATS[fmt].span

    def errors(got):
        return ((groups_of(got, span) - groups_of(values, span)) ** 2 * importance(values, span)).sum(axis=2)

    ours, plain = errors(requantized(values, fmt)), errors(plainly_rounded(values, fmt))
    assert (ours <= plain * 1.001 + 1e-12).all()


@sample
@given(n=st.integers(1, 20), blocks=st.integers(1, 4), seed=st.integers(0, 2**32 - 1))
def test_eight_bits_round_to_a_127th_of_their_group(n, blocks, seed):
    values = weights(n, 32 * blocks, seed, spread=2)
    got = requantized(values, "q8_0")
    largest = np.abs(values.reshape(n, -1, 32)).max(axis=2, keepdims=True)
    error = np.sqrt(((got - values).reshape(n, -1, 32) ** 2).mean(axis=2, keepdims=True))
    assert (error <= 0.502 * largest / 127 + 1e-6).all()


@pytest.mark.parametrize(("fmt", "type_"), [("q4_0", "Q4_0"), ("q4_1", "Q4_1"), ("q8_0", "Q8_0")])
def test_four_bits_are_nearer_than_the_usual_quantizer(fmt, type_):
    values = np.random.default_rng(0).standard_normal((256, 512)).astype(np.float32)
    number = gguf.GGMLQuantizationType[type_]
    usual = quants.dequantize(quants.quantize(values, number), number)

    def error(got):
        return float(((got - values) ** 2 * importance(values, 32).reshape(values.shape)).sum())

    assert error(requantized(values, fmt)) < {"q8_0": 1.0}.get(fmt, 0.92) * error(usual)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("k", [128, 96, 320])
def test_what_the_format_holds_is_kept_exactly(fmt, k):
    """Weights that are codes times a float16 already, all codes used: k of 96 and 320 end in a shorter group."""
    f, rng = BLOCK_FORMATS[fmt], np.random.default_rng(k)
    shape = (20, -(-k // f.span), 1)
    codes = rng.integers(*((-127, 128) if f.bits == 8 else (0, 16)), (20, k))
    codes[:, :: f.span] = -127 if f.bits == 8 else 0
    codes[:, 1 :: f.span] = 127 if f.bits == 8 else 15
    scale = rng.integers(1, 100, shape) / 1024
    low = rng.integers(-50, 50, shape) / 64 if f.affine else -f.zero * scale
    values = (groups_of(codes, f.span) * scale + low).reshape(20, -1)[:, :k].astype(np.float32)
    np.testing.assert_array_equal(requantized(values, fmt), values)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e38])
def test_values_beyond_the_format_are_refused(fmt, bad):
    values = np.ones((17, 160), np.float32)
    values[16, 150] = bad
    with pytest.raises(CheckpointError, match=f"Tensor w holds a value that is not finite or too large for {fmt}"):
        pack_quantized(values, "w", fmt)


def compiled(checkpoint, **options):
    return compile_cpu(checkpoint, BuildOptions(**LIMITS, **options)).ranks


def formats_of(rank):
    return {s["tensor"]: s["format"] for linear in rank.plan["linears"].values() for s in linear["segments"]}


@pytest.mark.parametrize(
    ("options", "layers", "head"),
    [
        ({"quantize": "int8"}, "q8_0", "q8_0"),
        ({"quantize": "int4"}, "q4_1", "q8_0"),
        ({"quantize": "int4", "quantize_symmetric": True}, "q4_0", "q8_0"),
        ({"quantize": "int4", "quantize_group": 64}, "q4_1_g64", "q8_0"),
        ({"quantize": "int4", "quantize_group": 128, "quantize_symmetric": True}, "q4_0_g128", "q8_0"),
        ({"quantize": "int4", "quantize_lm_head": True}, "q4_1", "q4_1"),
    ],
)
def test_layers_are_quantized_the_ends_have_eight_bits_and_norms_stay(options, layers, head):
    checkpoint = random_checkpoint(replace(CONFIGS["llama"], tie_word_embeddings=False, **SIZES))
    (rank,) = compiled(checkpoint, **options)
    formats = formats_of(rank)
    assert formats.pop("embedding") == "q8_0"
    assert formats.pop("lm_head") == head
    assert set(formats.values()) == {layers}
    tensors = tensors_of(rank)
    norm = "model.layers.0.input_layernorm.weight"
    np.testing.assert_array_equal(tensors[rank.plan["ops"][1]["norm"]], checkpoint.read(norm))
    for part in ("q", "k", "v", "o"):
        exact = checkpoint.read(f"model.layers.1.self_attn.{part}_proj.weight")
        error = np.abs(tensors[f"layers.1.{part}"] - exact).mean() / np.abs(exact).mean()
        assert 0 < error < (0.01 if layers == "q8_0" else 0.15)


class StoredCheckpoint(MemoryCheckpoint):
    """Matrices in a GGUF type."""

    def __init__(self, config, arrays, storage):
        super().__init__(config, arrays)
        self._storage, self._type = storage, gguf.GGMLQuantizationType[storage.upper()]

    def tensors(self):
        return {
            name: replace(info, storage=self._storage) if len(info.shape) == 2 else info
            for name, info in super().tensors().items()
        }

    def read_stored(self, name):
        return quants.quantize(self.read(name), self._type)


@pytest.mark.parametrize(
    ("storage", "quantize", "kept"),
    [
        ("q4_0", "int4", True),
        ("q4_1", "int4", True),
        ("q5_0", "int4", False),
        ("q8_0", "int4", False),
        ("q4_0", "int8", True),
        ("q8_0", "int8", True),
        ("bf16", "int8", False),
    ],
)
def test_stored_weights_are_requantized_from_their_values_where_that_saves_memory(storage, quantize, kept):
    random = random_checkpoint(replace(CONFIGS["llama"], **SIZES))
    checkpoint = StoredCheckpoint(random.config, random.arrays, storage)
    if storage == "bf16":
        checkpoint.read_stored = lambda name: quants.quantize(random.read(name), checkpoint._type).view(np.uint16)
    (rank,) = compiled(checkpoint, quantize=quantize)
    name = "model.layers.0.mlp.down_proj.weight"
    exact = quants.dequantize(quants.quantize(random.read(name), checkpoint._type), checkpoint._type)
    got = tensors_of(rank)["layers.0.down"]
    if kept:
        assert formats_of(rank)["layers.0.down"] == storage
        np.testing.assert_array_equal(got, exact)
    else:
        fmt = quantized_format(quantize, 32, False)
        assert formats_of(rank)["layers.0.down"] == fmt
        np.testing.assert_array_equal(got, requantized(np.ascontiguousarray(exact, np.float32), fmt))


@pytest.mark.parametrize("options", [{"quantize": "int8"}, {"quantize": "int4", "quantize_group": 64}])
def test_ranks_together_hold_the_weights_of_one_rank(options):
    checkpoint = random_checkpoint(replace(CONFIGS["llama"], **{**SIZES, "intermediate_size": 256}))
    (whole,) = (tensors_of(rank) for rank in compiled(checkpoint, **options))
    parts = [tensors_of(rank) for rank in compiled(checkpoint, tp=2, **options)]
    for name, axis in (("layers.0.q", 0), ("layers.1.o", 1), ("layers.0.gate", 0), ("layers.1.down", 1)):
        np.testing.assert_array_equal(np.concatenate([part[name] for part in parts], axis), whole[name])


@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        (
            {},
            {"tp": 4, "quantize_group": 64},
            r"o_proj\.weight would be quantized in groups of 64 columns; a rank's share of 32 of its 128 columns would "
            r"cut them\. Use fewer ranks \(--tp\) or smaller groups \(--quantize-group\)",
        ),
        ({"intermediate_size": 164}, {}, r"down_proj\.weight has 164 columns; --quantize on target cpu takes multip"),
    ],
)
def test_what_cannot_be_quantized(sizes, options, message):
    checkpoint = random_checkpoint(replace(CONFIGS["llama"], **{**SIZES, **sizes}))
    with pytest.raises(UnsupportedModel, match=message):
        compiled(checkpoint, quantize="int4", **options)


def test_a_quantized_engine_keeps_its_cache_in_16_bits():
    checkpoint = random_checkpoint(replace(CONFIGS["llama"], **SIZES))
    assert compiled(checkpoint)[0].plan["kv"]["dtype"] == "f32"
    assert compiled(checkpoint, quantize="int8")[0].plan["kv"]["dtype"] == "int16"
