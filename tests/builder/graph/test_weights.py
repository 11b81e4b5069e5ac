"""Lazy weights: read when asked, every time anew, offset included."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from aotllm.builder.graph import Tracer, Weights
from aotllm.errors import CheckpointError
from tests.builder.fakes import TINY, MemoryCheckpoint


class CountingCheckpoint(MemoryCheckpoint):
    reads = 0

    def read(self, name):
        self.reads += 1
        return super().read(name)


def weights(offset=0.0):
    arrays = {"m.weight": np.arange(6).reshape(2, 3), "n.weight": np.arange(3)}
    checkpoint = CountingCheckpoint(replace(TINY, rms_norm_weight_offset=offset), arrays)
    return checkpoint, Weights(Tracer("test"), checkpoint)


def test_data_is_read_when_asked_for_and_not_kept():
    checkpoint, w = weights()
    tensor = w.matrix("m.weight", 2, 3).value.const_value
    assert checkpoint.reads == 0
    assert (tensor.name, tensor.source, list(tensor.shape), tensor.nbytes) == ("m.weight", "m.weight", [2, 3], 24)
    for reads in (1, 2):
        np.testing.assert_array_equal(tensor.numpy(), checkpoint.arrays["m.weight"])
        assert checkpoint.reads == reads
    assert tensor.tobytes() == checkpoint.arrays["m.weight"].tobytes()


def test_only_norms_get_the_offset():
    _, w = weights(offset=1.0)
    np.testing.assert_array_equal(w.norm("n.weight", 3).value.const_value.numpy(), np.float32([1, 2, 3]))
    _, w = weights(offset=1.0)
    np.testing.assert_array_equal(w.vector("n.weight", 3).value.const_value.numpy(), np.float32([0, 1, 2]))


def test_an_offset_leaves_the_checkpoint_alone():
    checkpoint, w = weights(offset=1.0)
    tensor = w.norm("n.weight", 3).value.const_value
    for _ in range(2):
        np.testing.assert_array_equal(tensor.numpy(), np.float32([1, 2, 3]))
    np.testing.assert_array_equal(checkpoint.arrays["n.weight"], np.float32([0, 1, 2]))


def test_missing_and_misshapen_tensors_are_named():
    _, w = weights()
    with pytest.raises(CheckpointError, match="no tensor 'x.weight', which a llama model needs"):
        w.vector("x.weight", 3)
    with pytest.raises(CheckpointError, match=r"'m.weight' has shape \[2, 3\].*asks for \[3, 2\]"):
        w.matrix("m.weight", 3, 2)
