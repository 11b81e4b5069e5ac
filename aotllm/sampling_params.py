"""`SamplingParams`: how the tokens of a request are drawn, and when it ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aotllm.errors import InvalidRequest
from aotllm.parameters import ParameterSpec, check_parameters, documented, parameter

MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 256
MAX_BAD_WORDS = 256
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKEN_IDS = 2**18  # the largest vocabularies of today
MAX_LOGPROBS = 20
MAX_SEQUENCES = 128


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
    typical_p: float = parameter(
        1.0,
        ParameterSpec(
            "Draw from tokens about as surprising as the average one, whose probabilities add up to this; 1 = off.",
            float,
            low=0.0,
            low_open=True,
            high=1.0,
        ),
    )
    repetition_penalty: float = parameter(
        1.0,
        ParameterSpec(
            "Divides the positive logits of tokens of the prompt and the answer, and multiplies the negative ones: "
            "above 1 discourages repetition, below 1 encourages it; 1 = off.",
            float,
            low=0.0,
            low_open=True,
        ),
    )
    presence_penalty: float = parameter(
        0.0,
        ParameterSpec(
            "Taken from the logit of each token that the answer has already; 0 = off.", float, low=-2.0, high=2.0
        ),
    )
    frequency_penalty: float = parameter(
        0.0,
        ParameterSpec(
            "Taken from the logit of a token once for each time that the answer has it already; 0 = off.",
            float,
            low=-2.0,
            high=2.0,
        ),
    )
    no_repeat_ngram_size: int = parameter(
        0,
        ParameterSpec(
            "No sequence of this many tokens comes twice in the prompt and the answer; 0 = off.",
            int,
            low=0,
            high=2**31 - 1,
        ),
    )
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = parameter(
        (),
        ParameterSpec(
            "Added to the logits, by token id; kept as pairs in the order of ids.",
            float,
            low=-100.0,
            high=100.0,
            key=ParameterSpec("Token id.", int, low=0, high=2**31 - 1),
            max_items=MAX_LOGIT_BIAS,
        ),
    )
    allowed_token_ids: tuple[int, ...] | None = parameter(
        None,
        ParameterSpec(
            "The only tokens that may be generated, end tokens included; None = all.",
            int,
            low=0,
            high=2**31 - 1,
            many=True,
            min_items=1,
            max_items=MAX_ALLOWED_TOKEN_IDS,
            optional=True,
        ),
    )
    bad_words: tuple[str, ...] = parameter(
        (),
        ParameterSpec(
            "Texts that the answer must not contain as the tokenizer splits them, alone or after a space.",
            str,
            many=True,
            max_items=MAX_BAD_WORDS,
        ),
    )
    min_tokens: int = parameter(
        0,
        ParameterSpec(
            "No end token, stop token or stop string ends the answer before this many tokens; at most max_tokens.",
            int,
            low=0,
            high=2**31 - 1,
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
    prompt_logprobs: int | None = parameter(
        None,
        ParameterSpec(
            "Report the log-probability of each prompt token but the first and of this many most likely ones in its "
            "place; None = off.",
            int,
            low=0,
            high=MAX_LOGPROBS,
            optional=True,
        ),
    )
    n: int = parameter(
        1,
        ParameterSpec("Answers to the one prompt, which is computed once.", int, low=1, high=MAX_SEQUENCES),
    )
    best_of: int | None = parameter(
        None,
        ParameterSpec(
            "Generate this many answers and keep the n whose tokens are the most likely on average; None = n.",
            int,
            low=1,
            high=MAX_SEQUENCES,
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
        for name in ("stop", "stop_token_ids", "logit_bias", "bad_words"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, ())
        check_parameters(self)
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens must be at most max_tokens, which is {self.max_tokens}, got {self.min_tokens}",
                "min_tokens",
            )
        if self.best_of is not None and self.best_of < self.n:
            raise InvalidRequest(f"best_of must be at least n, which is {self.n}, got {self.best_of}", "best_of")

    @property
    def num_sequences(self) -> int:
        """Answers that are generated, whether or not all of them are kept."""
        return self.n if self.best_of is None else self.best_of

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
            "typical_p": "typical_p",
            "repetition_penalty": "repetition_penalty",
            "no_repeat_ngram_size": "no_repeat_ngram_size",
            "max_new_tokens": "max_tokens",
        }
        return cls(**{ours: config[theirs] for theirs, ours in names.items() if config.get(theirs) is not None})
