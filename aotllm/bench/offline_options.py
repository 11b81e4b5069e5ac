"""The options of `aotllm bench throughput` and `latency`, beside those of the executor and of the report."""

from __future__ import annotations

from dataclasses import dataclass

from aotllm.errors import InvalidRequest
from aotllm.parameters import ParameterSpec, check_parameters, documented, parameter

DEFAULT_INPUT_LEN = 128
DEFAULT_OUTPUT_LEN = 128
_INT_MAX = 2**31 - 1


@documented
@dataclass(frozen=True)
class PromptOptions:
    """What to ask an engine: random tokens of given lengths.

    Raises:
        InvalidRequest: a value is out of range; `param` names it.
    """

    input_len: int | None = parameter(
        None,
        ParameterSpec(
            f"Tokens of each prompt; default: {DEFAULT_INPUT_LEN}.", int, low=1, high=_INT_MAX, optional=True
        ),
    )
    output_len: int | None = parameter(
        None,
        ParameterSpec(
            f"Tokens of each answer; default: {DEFAULT_OUTPUT_LEN}, or those of the file.",
            int,
            low=1,
            high=_INT_MAX,
            optional=True,
        ),
    )
    temperature: float = parameter(0.0, ParameterSpec("Sampling temperature; 0 = greedy.", float, low=0))
    ignore_eos: bool | None = parameter(
        None,
        ParameterSpec(
            "Answers go on to their wanted length; on for random prompts, off for --dataset unless given.",
            bool,
            optional=True,
        ),
    )
    seed: int = parameter(0, ParameterSpec("Of tokens, lengths and draws.", int))

    def __post_init__(self) -> None:
        check_parameters(self)


@documented
@dataclass(frozen=True)
class ThroughputOptions:
    """How many requests, and how many of them at a time.

    Raises:
        InvalidRequest: a value is out of range, or no list of numbers; `param` names it.
    """

    dataset: str | None = parameter(
        None,
        ParameterSpec(
            "File of conversations (ShareGPT's form or OpenAI messages) or lines with `prompt`, in place of random "
            "prompts; the first turn of each, without chat template.",
            str,
            optional=True,
        ),
    )
    range_ratio: float = parameter(
        0.0,
        ParameterSpec("Lengths are uniform between (1 - R) and (1 + R) times the wanted one.", float, low=0, high=1),
    )
    prefix_len: int = parameter(
        0,
        ParameterSpec("Tokens at the beginning that all prompts share, before --input-len.", int, low=0, high=_INT_MAX),
    )
    num_prompts: int = parameter(100, ParameterSpec("Requests of a run.", int, low=1, high=_INT_MAX))
    concurrency: str | None = parameter(
        None,
        ParameterSpec(
            "Most requests at a time; several, as in 1,2,4,8, make a sweep. Default: all, as many as the engine's "
            "batch takes.",
            str,
            optional=True,
        ),
    )
    warmups: int = parameter(2, ParameterSpec("Requests before the first measured one.", int, low=0, high=_INT_MAX))
    repeats: int = parameter(
        3,
        ParameterSpec(
            "Runs of each point, in turns; their median is reported with the extremes.", int, low=1, high=1000
        ),
    )

    def __post_init__(self) -> None:
        check_parameters(self)
        self.sweep()

    def sweep(self) -> list[int | None]:
        """One per point; None = all at once."""
        return [None] if self.concurrency is None else list(whole_numbers(self.concurrency, "concurrency", 1))


@documented
@dataclass(frozen=True)
class LatencyOptions:
    """Batches that begin together.

    Raises:
        InvalidRequest: a value is out of range, or no list of numbers; `param` names it.
    """

    batch_sizes: str = parameter(
        "1", ParameterSpec("Requests that begin together; several, as in 1,2,4,8,16,32,64, make a sweep.", str)
    )
    depth: str = parameter(
        "0",
        ParameterSpec(
            "Tokens before each prompt that are in the KV cache already; several, as in 0,1024,2048, make a sweep.",
            str,
        ),
    )
    warmups: int = parameter(1, ParameterSpec("Short runs of each point before its first one.", int, low=0, high=1000))
    repeats: int = parameter(
        5,
        ParameterSpec(
            "Runs of each point, in turns; their median is reported with the extremes.", int, low=1, high=1000
        ),
    )

    def __post_init__(self) -> None:
        check_parameters(self)
        self.sizes(), self.depths()

    def sizes(self) -> list[int]:
        """Batch sizes in the order given."""
        return whole_numbers(self.batch_sizes, "batch_sizes", 1)

    def depths(self) -> list[int]:
        """In the order given."""
        return whole_numbers(self.depth, "depth", 0)


def whole_numbers(text: str, name: str, low: int) -> list[int]:
    """`1,2,4` as numbers, each at least `low`. Raises InvalidRequest."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and low <= int(part) <= _INT_MAX for part in parts):
        flag = name.replace("_", "-")
        raise InvalidRequest(f"--{flag} takes whole numbers from {low} on, as in 1,2,4; got {text!r:.80}", name)
    return [int(part) for part in parts]
