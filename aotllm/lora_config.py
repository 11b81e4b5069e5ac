"""`LoraConfig`: the `adapter_config.json` of a LoRA adapter, as PEFT writes it.

The fields are those of `peft.LoraConfig`; what PEFT does with them is in `peft/tuners/lora/model.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from aotllm.builder.checkpoints.fields import Fields
from aotllm.builder.checkpoints.json_file import read_json_object
from aotllm.errors import CheckpointError, UnsupportedModel

T = TypeVar("T", int, float)

_OTHER_KINDS = (
    "use_dora", "use_qalora", "lora_bias", "modules_to_save", "trainable_token_indices", "layer_replication",
    "target_parameters", "alora_invocation_tokens", "monteclora_config", "use_bdlora", "arrow_config", "kasa_config",
)  # fmt: skip
"""Fields that, where set, make of an adapter more than y += B · (A · x)."""
_PLAIN_INITS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
"""Values of `init_lora_weights` that leave the base model as it is. The others take out of its weights what they put
into the adapter, which then fits no other base model."""

_LARGEST_RANK = 2**16
_LONGEST_NAME = 72
_MOST_STEPS = 10_000


class LoraConfig:
    """Refuses what is no plain LoRA, and gives the rank and scale of each module.

    `fan_in_fan_out` is not looked at: it tells how the base model stores its weights; A and B are the same both ways.

    Raises:
        CheckpointError: the file is missing or malformed.
        UnsupportedModel: an adapter of another kind than plain LoRA.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fields = Fields(str(path), read_json_object(path))
        self._refuse_other_kinds()
        self._rank = self._fields.integer("r", maximum=_LARGEST_RANK)
        self._alpha = self._fields.number("lora_alpha", positive=False)
        self._use_rslora = self._fields.boolean("use_rslora", False)
        self._steps = 0
        self._ranks = self._patterns("rank_pattern", lambda f, name: f.integer(name, maximum=_LARGEST_RANK))
        self._alphas = self._patterns("alpha_pattern", lambda f, name: f.number(name, positive=False))
        self._targets = self._read_targets()
        self._layers = self._read_layers()

    def rank(self, module: str) -> int:
        """Rank of the module with this full name."""
        return _first_match(self._ranks, module, self._rank)

    def scale(self, module: str) -> float:
        """What B · (A · x) is multiplied by: alpha / rank, or alpha / √rank for rank-stabilized LoRA (2312.03732)."""
        rank = self.rank(module)
        return _first_match(self._alphas, module, self._alpha) / (math.sqrt(rank) if self._use_rslora else rank)

    def check_target(self, module: str, layer: int) -> None:
        """Raises CheckpointError where the configuration leaves out a module that has tensors."""
        if self._targets is not None and not any(module == t or module.endswith(f".{t}") for t in self._targets):
            raise CheckpointError(f"{self.path}: there are tensors for '{module}', but 'target_modules' lacks it")
        if self._layers is not None and layer not in self._layers:
            raise CheckpointError(f"{self.path}: there are tensors for '{module}', but 'layers_to_transform' lacks it")

    def _refuse_other_kinds(self) -> None:
        kind = self._fields.string("peft_type")
        if kind != "LORA":
            raise UnsupportedModel(f"{self.path}: field 'peft_type' is {kind[:80]!r}; only 'LORA' is supported")
        for name in _OTHER_KINDS:
            if self._fields.raw(name):
                raise UnsupportedModel(
                    f"{self.path}: field '{name}' is set; only plain LoRA can be loaded, others merged into the model"
                )
        bias = self._fields.string("bias", "none")
        if bias != "none":
            raise UnsupportedModel(f"{self.path}: field 'bias' is {bias[:80]!r}; only 'none' is supported")
        init = self._fields.raw("init_lora_weights")
        if not any(type(init) is type(plain) and init == plain for plain in _PLAIN_INITS):
            raise UnsupportedModel(
                f"{self.path}: field 'init_lora_weights' is {str(init)[:80]!r}, which changes the base model; save the "
                "adapter with PEFT's path_initial_model_for_weight_conversion"
            )

    def _read_targets(self) -> list[str] | None:
        """None where they are not a list of names but a regular expression, or all."""
        targets = self._fields.raw("target_modules")
        if targets is None or isinstance(targets, str):
            return None
        if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
            self._fields.fail("target_modules", "a list of module names, or a string")
        return list(targets)

    def _read_layers(self) -> list[int] | None:
        layers = self._fields.raw("layers_to_transform")
        if layers is None or layers == []:
            return None
        layers = layers if isinstance(layers, list) else [layers]
        if not all(isinstance(layer, int) and not isinstance(layer, bool) for layer in layers):
            self._fields.fail("layers_to_transform", "a layer or a list of layers")
        return list(layers)

    def _patterns(self, name: str, read: Callable[[Fields, str], T]) -> dict[re.Pattern[str], T]:
        """Patterns of module names and their values; the first one that matches counts."""
        fields = self._fields.child(name)
        values = self._fields.raw(name) or {}
        if fields is None:
            return {}
        return {self._compile(name, pattern): read(fields, pattern) for pattern in values}

    def _compile(self, name: str, pattern: str) -> re.Pattern[str]:
        """A pattern is a program out of a file of anyone's: only those are run that cannot take long.

        Without repeated groups and look-around, a match takes at most about the length of the module's name to the
        power of the repetitions, times the alternatives to the power of the groups.
        """
        repeats = len(re.findall(r"[*+?{]", pattern))
        groups, bars = pattern.count("("), pattern.count("|")
        simple = len(pattern) <= 512 and repeats <= 2 and groups <= 4 and not re.search(r"\)[*+?{]|\(\?|\\\d", pattern)
        self._steps += _LONGEST_NAME**repeats * (bars + 1) ** groups if simple else 0
        if not simple or self._steps > _MOST_STEPS:
            raise UnsupportedModel(
                f"{self.path}: the patterns of '{name}' are too complex, from {pattern[:80]!r} on; name modules in full"
            )
        try:
            return re.compile(rf"(?:.*\.)?(?:{pattern})")
        except (re.error, OverflowError, RecursionError) as error:
            raise CheckpointError(
                f"{self.path}: the pattern {pattern[:80]!r} of '{name}' is no regular expression ({error})"
            ) from error


def _first_match(patterns: Mapping[re.Pattern[str], T], module: str, default: T) -> T:
    return next((value for pattern, value in patterns.items() if pattern.fullmatch(module)), default)
