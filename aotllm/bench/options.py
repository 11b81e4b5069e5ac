"""The options of `aotllm bench serve`: each is declared here and nowhere else; the flags are generated from them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aotllm.bench.arrivals import Arrivals, RampUp
from aotllm.bench.backends.base import BACKENDS
from aotllm.bench.goodput import parse_goodput
from aotllm.bench.latencies import LATENCIES
from aotllm.bench.profiles import PROFILES
from aotllm.errors import InvalidRequest
from aotllm.parameters import ParameterSpec, check_parameters, documented, parameter

DEFAULT_PROFILE = "api"
DEFAULT_NUM_PROMPTS = 100
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def _text(doc: str, *choices: str) -> ParameterSpec:
    return ParameterSpec(doc, str, optional=True, choices=choices or None)


def _count(doc: str, low: int = 1, high: int = 2**31 - 1) -> ParameterSpec:
    return ParameterSpec(doc, int, low=low, high=high, optional=True)


@documented
@dataclass(frozen=True)
class TargetOptions:
    """Whom to ask.

    Raises:
        InvalidRequest: a value is out of range; `param` names it.
    """

    url: str = parameter(
        "http://127.0.0.1:8000",
        ParameterSpec("Server; a trailing /v1 is taken off. HOST:PORT or grpcs://HOST:PORT for kserve-grpc.", str),
    )
    backend: str = parameter(
        "openai-chat",
        ParameterSpec(
            "openai: /v1/completions; openai-chat: /v1/chat/completions; kserve-http: generate_stream; kserve-grpc: "
            "ModelStreamInfer, as TensorRT-LLM's ensemble has them.",
            str,
            choices=BACKENDS,
        ),
    )
    endpoint: str | None = parameter(None, _text("Path of the route, where it is not the protocol's usual one."))
    model: str | None = parameter(None, _text("Name of the model; default: the server's first one; KServe: ensemble."))
    api_key: str | None = parameter(
        None, _text("Sent as `Authorization: Bearer KEY`; default: the environment's OPENAI_API_KEY.")
    )
    header: tuple[str, ...] = parameter(
        (), ParameterSpec("Further header, NAME: VALUE; may be repeated.", str, many=True, max_items=100)
    )
    insecure: bool = parameter(False, ParameterSpec("Take any TLS certificate.", bool))
    timeout: float = parameter(
        600.0, ParameterSpec("Seconds until a request is given up and counts as failed.", float, low=0, low_open=True)
    )
    temperature: float | None = parameter(
        0.0, ParameterSpec("Sampling temperature of all requests.", float, low=0, optional=True)
    )
    ignore_eos: bool | None = parameter(
        None,
        ParameterSpec(
            "Answers go on to their wanted length; on for profiles, off for --dataset unless given.",
            bool,
            optional=True,
        ),
    )
    continuous_usage: bool = parameter(
        False,
        ParameterSpec(
            "Ask for token counts in each chunk: exact inter-token latencies where chunks have several tokens (vLLM, "
            "SGLang, aotllm); costs the server a little.",
            bool,
        ),
    )
    extra_body: str | None = parameter(None, _text("JSON object with further fields of each request."))

    def __post_init__(self) -> None:
        check_parameters(self)
        self.headers()
        self.extra_fields()

    def headers(self) -> dict[str, str]:
        """All headers but the key's."""
        headers = {}
        for header in self.header:
            name, colon, value = header.partition(":")
            if not colon or not name.strip():
                raise InvalidRequest(f"--header takes NAME: VALUE, got {header!r}", "header")
            headers[name.strip()] = value.strip()
        return headers

    def extra_fields(self) -> dict[str, Any]:
        """`extra_body` as an object."""
        try:
            fields = json.loads(self.extra_body or "{}")
        except ValueError as error:
            raise InvalidRequest(f"--extra-body is not JSON: {error}", "extra_body") from None
        if not isinstance(fields, dict):
            raise InvalidRequest(f"--extra-body takes a JSON object, got {self.extra_body}", "extra_body")
        return fields


@documented
@dataclass(frozen=True)
class WorkloadOptions:
    """What to ask.

    Raises:
        InvalidRequest: a value is out of range, or contradicts another one; `param` names it.
    """

    profile: str | None = parameter(
        None,
        _text(
            "api: short prompts and answers (the default); rag: long prompts; agent: a shared system prompt and a "
            "growing history; multi-turn: chats; random: fixed lengths.",
            *PROFILES,
        ),
    )
    dataset: str | None = parameter(
        None,
        _text(
            "File of conversations (ShareGPT's form or OpenAI messages) or lines with `prompt`; the first turn of "
            "each, or all with --profile multi-turn."
        ),
    )
    tokenizer: str | None = parameter(
        None, _text("Engine, folder or tokenizer.json that makes prompts of exact lengths; default: the server's.")
    )
    input_len: int | None = parameter(None, _count("Tokens of new text in each turn, in place of the profile's."))
    output_len: int | None = parameter(None, _count("Tokens of an answer, in place of the profile's or the file's."))
    range_ratio: float | None = parameter(
        None,
        ParameterSpec(
            "Lengths are uniform between (1 - R) and (1 + R) times the wanted one.", float, low=0, high=1, optional=True
        ),
    )
    prefix_len: int | None = parameter(None, _count("Tokens of a system prompt that all prompts share.", 0))
    turns: int | None = parameter(None, _count("Turns of a conversation.", 1, 10_000))
    think_time: float = parameter(0.0, ParameterSpec("Seconds between an answer and the next turn.", float, low=0))

    def __post_init__(self) -> None:
        check_parameters(self)
        if self.dataset is None:
            return
        if self.profile not in (None, "multi-turn"):
            raise InvalidRequest("--dataset goes with --profile multi-turn or none", "profile")
        for name in ("input_len", "range_ratio", "prefix_len", "turns"):
            if getattr(self, name) is not None:
                raise InvalidRequest(f"--{name.replace('_', '-')} has no meaning with --dataset", name)

    @property
    def profile_name(self) -> str:
        """The given one or the default."""
        return self.profile or DEFAULT_PROFILE


@documented
@dataclass(frozen=True)
class LoadOptions:
    """How much to ask at a time.

    Raises:
        InvalidRequest: a value is out of range, or contradicts another one; `param` names it.
    """

    rate: str = parameter(
        "inf",
        ParameterSpec(
            "Requests that begin per second (conversations, where they have several turns); inf = all at once; "
            "several, as in 1,2,4, make a sweep.",
            str,
        ),
    )
    concurrency: str | None = parameter(
        None,
        _text("Most requests at a time; with --rate inf, so many all the time; several, as in 1,2,4, make a sweep."),
    )
    burstiness: str = parameter(
        "1",
        ParameterSpec(
            "Shape of the gamma distribution of gaps: 1 = Poisson arrivals, below = bursts, above = more even, inf = "
            "all gaps alike.",
            str,
        ),
    )
    ramp_up_strategy: str | None = parameter(
        None, _text("linear or exponential: let the rate grow over the run.", "linear", "exponential")
    )
    ramp_up_start_rps: float | None = parameter(
        None, ParameterSpec("Rate at the beginning of a ramp.", float, low=0, low_open=True, optional=True)
    )
    ramp_up_end_rps: float | None = parameter(
        None, ParameterSpec("Rate at the end of a ramp.", float, low=0, low_open=True, optional=True)
    )
    num_prompts: int | None = parameter(
        None, _count(f"Requests, each turn counted; default: {DEFAULT_NUM_PROMPTS}, or no limit with a time.")
    )
    duration: str | None = parameter(
        None, _text("Time after which no more requests are sent: 90, 90s, 5m, 1h; per point of a sweep.")
    )
    soak: str | None = parameter(
        None, _text("Run for so long, print a line per minute, and report drifts of latency, errors and memory.")
    )
    warmups: int = parameter(0, ParameterSpec("Requests before the first measured one.", int, low=0, high=2**31 - 1))
    seed: int = parameter(0, ParameterSpec("Of texts, lengths and arrivals.", int))

    def __post_init__(self) -> None:
        check_parameters(self)
        arrivals, concurrencies = self.sweep_arrivals(), self.sweep_concurrencies()
        if len(arrivals) > 1 and len(concurrencies) > 1:
            raise InvalidRequest("a sweep goes over --rate or over --concurrency, not both", "concurrency")
        if self.soak is not None and (self.duration is not None or self.num_prompts is not None):
            raise InvalidRequest("--soak is a time of its own: leave out --duration and --num-prompts", "soak")
        if self.soak is not None and len(arrivals) * len(concurrencies) > 1:
            raise InvalidRequest("--soak takes one --rate or one --concurrency, not a sweep", "soak")
        endless = any(math.isinf(a.rate) and a.ramp_up is None for a in arrivals) and None in concurrencies
        if self.seconds is not None and self.num_prompts is None and endless:
            name = "soak" if self.soak is not None else "duration"
            raise InvalidRequest(f"--{name} needs --concurrency or --rate, or all requests come at once", name)

    @property
    def seconds(self) -> float | None:
        """Of `duration` or `soak`."""
        if self.soak is not None:
            return _seconds(self.soak, "soak")
        return None if self.duration is None else _seconds(self.duration, "duration")

    @property
    def prompts(self) -> int | None:
        """How many requests; None = no limit."""
        if self.num_prompts is None and self.seconds is None:
            return DEFAULT_NUM_PROMPTS
        return self.num_prompts

    def sweep_arrivals(self) -> list[Arrivals]:
        """One per rate."""
        shape = _numbers(self.burstiness, "burstiness")
        if len(shape) > 1:
            raise InvalidRequest(f"--burstiness takes one number, got {self.burstiness!r}", "burstiness")
        rates = _numbers(self.rate, "rate")
        ramp = (self.ramp_up_strategy, self.ramp_up_start_rps, self.ramp_up_end_rps)
        if ramp == (None, None, None):
            return [Arrivals(rate, shape[0]) for rate in rates]
        if self.ramp_up_strategy is None or self.ramp_up_start_rps is None or self.ramp_up_end_rps is None:
            raise InvalidRequest(
                "a ramp needs all of --ramp-up-strategy, --ramp-up-start-rps and --ramp-up-end-rps", "ramp_up_strategy"
            )
        if rates != [math.inf]:
            raise InvalidRequest("a ramp stands in place of --rate", "rate")
        exponential = self.ramp_up_strategy == "exponential"
        return [Arrivals(math.inf, shape[0], RampUp(self.ramp_up_start_rps, self.ramp_up_end_rps, exponential))]

    def sweep_concurrencies(self) -> list[int | None]:
        """One per limit; None = no limit."""
        if self.concurrency is None:
            return [None]
        limits = _numbers(self.concurrency, "concurrency")
        if any(not limit.is_integer() for limit in limits):
            raise InvalidRequest(f"--concurrency takes whole numbers, got {self.concurrency!r}", "concurrency")
        return [int(limit) for limit in limits]


@documented
@dataclass(frozen=True)
class ReportOptions:
    """What to report.

    Raises:
        InvalidRequest: a value is out of range; `param` names it.
    """

    goodput: tuple[str, ...] = parameter(
        (),
        ParameterSpec(
            "Objectives in milliseconds, as in ttft:200 tpot:50 e2el:5000; goodput counts the requests within all.",
            str,
            many=True,
            max_items=10,
        ),
    )
    percentile_metrics: str = parameter(
        ",".join(LATENCIES), ParameterSpec("Latencies that are reported, of ttft, tpot, itl, e2el.", str)
    )
    metric_percentiles: str = parameter(
        "50,90,95,99", ParameterSpec("Percentiles of latencies, as in 50,99,99.9.", str)
    )
    detailed: bool = parameter(
        True, ParameterSpec("Lengths, latencies, texts and errors of each request in the JSON.", bool)
    )
    plot: str | None = parameter(None, _text("File for the throughput-latency curve: .html, .svg or .png."))
    server_pid: int | None = parameter(None, _count("Process whose memory (with its children's) --soak follows."))
    metrics_url: str | None = parameter(
        None, _text("Prometheus metrics with process_resident_memory_bytes for --soak; default: URL/metrics.")
    )

    def __post_init__(self) -> None:
        check_parameters(self)
        self.objectives(), self.percents(), self.metrics()
        if self.plot is not None and Path(self.plot).suffix.lower() not in (".html", ".svg", ".png"):
            raise InvalidRequest(f"--plot takes a .html, .svg or .png file, got {self.plot!r}", "plot")

    def objectives(self) -> Mapping[str, float]:
        """Seconds by name."""
        return parse_goodput(self.goodput)

    def percents(self) -> list[float]:
        """In ascending order, each once."""
        try:
            percents = sorted({float(part) for part in self.metric_percentiles.split(",")})
        except ValueError:
            percents = [-1.0]
        if not all(0 <= percent <= 100 for percent in percents):
            raise InvalidRequest(
                f"--metric-percentiles takes numbers from 0 to 100, as in 50,99; got {self.metric_percentiles!r}",
                "metric_percentiles",
            )
        return percents

    def metrics(self) -> list[str]:
        """Names of latencies, in the order of LATENCIES."""
        names = {name.strip() for name in self.percentile_metrics.split(",")}
        if not names <= set(LATENCIES):
            raise InvalidRequest(
                f"--percentile-metrics takes some of {', '.join(LATENCIES)}; got {self.percentile_metrics!r}",
                "percentile_metrics",
            )
        return [name for name in LATENCIES if name in names]


def _numbers(text: str, name: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = [math.nan]
    if not all(number > 0 for number in numbers):
        raise InvalidRequest(f"--{name} takes numbers above 0, as in 1,2,4; got {text!r}", name)
    return numbers


def _seconds(text: str, name: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip())
    seconds = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not seconds > 0:
        raise InvalidRequest(f"--{name} takes a time as in 90, 90s, 5m or 1h; got {text!r}", name)
    return seconds
