"""LoRA adapters (arXiv 2106.09685) as PEFT saves them: `read_lora` turns a folder into arrays, or says why not.

The folder holds `adapter_config.json` and `adapter_model.safetensors`. The tensors say which linears are updated; the
configuration says by how much they are scaled, and whether the adapter is a plain LoRA, the only kind that is run.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from aotllm.builder.checkpoints.huggingface import canonical_name
from aotllm.builder.checkpoints.safetensors_file import SafetensorsFile
from aotllm.errors import CheckpointError, UnsupportedModel
from aotllm.lora_config import LoraConfig

if TYPE_CHECKING:
    from aotllm import _runtime

MODULES = ("q", "k", "v", "o", "gate", "up", "down")
"""The linears of a layer that an adapter can update, by the names of the runtime."""
MAX_RANK = 256

_WEIGHTS = "adapter_model.safetensors"
_TYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_FACTOR = re.compile(r"base_model\.model\.(.{1,256})\.lora_([AB])\.weight")
_MODULE = re.compile(r"(?:model\.)?layers\.([0-9]{1,3})\.(?:self_attn\.([qkvo])|mlp\.(gate|up|down))_proj")


@dataclass(frozen=True)
class LoraUpdate:
    """y += B · (A · x) beside one linear."""

    layer: int
    module: str
    """One of `MODULES`"""
    a: npt.NDArray[np.float32]
    """`[rank, in]`"""
    b: npt.NDArray[np.float32]
    """`[out, rank]`, the adapter's scale multiplied in"""


def read_lora(folder: str | Path) -> list[LoraUpdate]:
    """The updates of a PEFT adapter, by layer and module. Whether they fit an engine is for the runtime to say.

    Raises:
        CheckpointError: a file is missing, damaged, or contradicts itself.
        UnsupportedModel: an adapter of another kind than plain LoRA, or one that updates other modules than `MODULES`.
    """
    folder = Path(folder)
    config = LoraConfig(folder / "adapter_config.json")
    weights = folder / _WEIGHTS
    if not weights.exists() and (folder / "adapter_model.bin").exists():
        raise CheckpointError(f"{folder}: {_WEIGHTS} is missing (adapter_model.bin is pickled; save it as safetensors)")
    file = SafetensorsFile(weights)
    try:
        updates = [_read_update(file, config, module, names) for module, names in _pairs(file).items()]
    finally:
        file.close()
    if not updates:
        raise CheckpointError(f"{weights}: no tensors; expected pairs of lora_A and lora_B")
    updates.sort(key=lambda update: (update.layer, MODULES.index(update.module)))
    for first, second in itertools.pairwise(updates):
        if (first.layer, first.module) == (second.layer, second.module):
            raise CheckpointError(f"{weights}: two updates of '{first.module}' in layer {first.layer}; expected one")
    return updates


def read_adapter(folder: str | Path) -> _runtime.Adapter:
    """A PEFT adapter as the runtime takes it. Raises what `read_lora` raises."""
    return runtime_adapter(read_lora(folder))


def runtime_adapter(updates: Sequence[LoraUpdate]) -> _runtime.Adapter:
    """The updates as the runtime takes them."""
    from aotllm import _runtime

    adapter = _runtime.Adapter()
    for update in updates:
        adapter.add(update.layer, update.module, update.a, update.b)
    return adapter


def _pairs(file: SafetensorsFile) -> dict[str, dict[str, str]]:
    """Name of each module in PEFT's model → names of its tensors, by factor (A and B)."""
    pairs: dict[str, dict[str, str]] = {}
    for name in file.tensors:
        match = _FACTOR.fullmatch(name)
        if match is None:
            raise UnsupportedModel(
                f"{file.path}: tensor '{name}' is not of a plain LoRA; expected 'base_model.model.….lora_A.weight' or "
                "lora_B"
            )
        pairs.setdefault(match[1], {})[match[2]] = name
    for names in pairs.values():
        if len(names) < 2:
            (factor, name), other = next(iter(names.items())), "B" if "A" in names else "A"
            raise CheckpointError(f"{file.path}: tensor '{name}' is lora_{factor} of a pair without lora_{other}")
    return pairs


def _read_update(file: SafetensorsFile, config: LoraConfig, module: str, names: Mapping[str, str]) -> LoraUpdate:
    match = _MODULE.fullmatch(canonical_name(module))
    if match is None:
        raise UnsupportedModel(
            f"{file.path}: the adapter updates '{module}'; only the {', '.join(MODULES)} projections of layers can be"
        )
    layer = int(match[1])
    config.check_target(module, layer)
    rank = config.rank(module)
    if rank > MAX_RANK:
        raise UnsupportedModel(f"{config.path}: '{module}' has rank {rank}; at most {MAX_RANK} is supported")
    a = _matrix(file, names["A"], axis=0, rank=rank)
    b = _matrix(file, names["B"], axis=1, rank=rank)
    with np.errstate(over="ignore", invalid="ignore"):  # found by the check below
        b *= np.float32(config.scale(module))
    for factor, values in (("A", a), ("B", b)):
        if not np.isfinite(values).all():
            raise CheckpointError(f"{file.path}: tensor '{names[factor]}' holds values that are not finite once scaled")
    return LoraUpdate(layer, match[2] or match[3], a, b)


def _matrix(file: SafetensorsFile, name: str, *, axis: int, rank: int) -> npt.NDArray[np.float32]:
    """A float32 copy of a tensor of two dimensions, `rank` long along `axis`."""
    tensor = file.tensors[name]
    if tensor.dtype not in _TYPES:
        raise UnsupportedModel(
            f"{file.path}: tensor '{name}' holds {tensor.dtype} values; expected {', '.join(_TYPES)}"
        )
    if len(tensor.shape) != 2 or 0 in tensor.shape or tensor.shape[axis] != rank:
        expected = f"[{rank}, n]" if axis == 0 else f"[n, {rank}]"
        raise CheckpointError(
            f"{file.path}: tensor '{name}' has shape {list(tensor.shape)}; expected {expected} by the configured rank"
        )
    stored = file.file.array(tensor.offset, tensor.shape, _TYPES[tensor.dtype])
    if stored.dtype == np.uint16:
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32)
