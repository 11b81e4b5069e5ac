"""`SamplingParams`: how the tokens of a request are drawn, and when it ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aotllm.parameters import ParameterSpec, check_parameters, documented, parameter

MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 256
MAX_LOGPROBS = 20


@documented
@dataclass(frozen=True)
class SamplingParams:
    """Plain, immutable values, checked when made; `InvalidRequest.param` names the field that is wrong.

    Each field is declared here and nowhere else: the HTTP request models and the flags of `aotllm run` are generated
    from it. An engine's own defaults come from its generation_config.json, through `from_generation_config`.
    """

    max_tokens: int | None = parameter(
        None,
        ParameterSpec(
            "Most tokens to generate, the end token included; None = up to the engine's context length.",
            int,
            low=1,
            high=2**31 - 1,
            optional=True,
        ),
    )
    temperature: float = parameter(
        1.0,
        ParameterSpec(
            "Divides the logits: lower is more predictable; 0 = always the most likely token.",
            float,
            low=0.0,
            high=100.0,
        ),
    )
    top_k: int = parameter(
        0,
        ParameterSpec(
            "Draw from the k most likely tokens only; 0 (or -1) = off.",
            int,
            low=-1,
            high=2**31 - 1,
        ),
    )
    top_p: float = parameter(
        1.0,
        ParameterSpec(
            "Draw from the smallest set of likely tokens whose probabilities add up to this; 1 = off.",
            float,
            low=0.0,
            low_open=True,
            high=1.0,
        ),
    )
    min_p: float = parameter(
        0.0,
        ParameterSpec(
            "Leave out tokens less likely than this fraction of the most likely one; 0 = off.", float, low=0.0, high=1.0
        ),
    )
    seed: int | None = parameter(
        None,
        ParameterSpec(
            "Equal seeds give equal answers, whatever else is in the batch; None = a different draw each time.",
            int,
            low=-(2**63),
            high=2**64 - 1,
            optional=True,
        ),
    )
    stop: tuple[str, ...] = parameter(
        (),
        ParameterSpec(
            "Strings that end the answer when they appear in its text; they are not part of it.",
            str,
            many=True,
            max_items=MAX_STOP_STRINGS,
        ),
    )
    stop_token_ids: tuple[int, ...] = parameter(
        (),
        ParameterSpec(
            "Tokens that end the answer, besides the model's own end tokens.",
            int,
            low=0,
            high=2**31 - 1,
            many=True,
            max_items=MAX_STOP_TOKEN_IDS,
        ),
    )
    ignore_eos: bool = parameter(
        False, ParameterSpec("Go on after the model's end tokens, until max_tokens; for benchmarks.", bool)
    )
    logprobs: int | None = parameter(
        None,
        ParameterSpec(
            "Report the log-probability of each generated token and of this many most likely ones; None = off.",
            int,
            low=0,
            high=MAX_LOGPROBS,
            optional=True,
        ),
    )
    include_stop_str_in_output: bool = parameter(
        False, ParameterSpec("Keep the stop string, or the text of the stop token, at the end of the answer.", bool)
    )
    skip_special_tokens: bool = parameter(
        True, ParameterSpec("Leave special tokens such as <|im_end|> out of the text.", bool)
    )

    def __post_init__(self) -> None:
        # JSON clients say null for "no stop strings".
        for name in ("stop", "stop_token_ids"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, ())
        check_parameters(self)
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)

    def replace(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed, validated again."""
        return dataclasses.replace(self, **changes)

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any]) -> SamplingParams:
        """The checkpoint's own sampling defaults, from the keys of Hugging Face's generation_config.json.

        Raises:
            InvalidRequest: a value of the file is out of range.
        """
        names = {
            "temperature": "temperature",
            "top_k": "top_k",
            "top_p": "top_p",
            "min_p": "min_p",
            "max_new_tokens": "max_tokens",
        }
        return cls(**{ours: config[theirs] for theirs, ours in names.items() if config.get(theirs) is not None})
