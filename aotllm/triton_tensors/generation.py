"""`Generation`: what the engine is to do for a request, and which tensors are to come of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aotllm.beam_search import BeamSearchParams
from aotllm.errors import InvalidRequest
from aotllm.request import Request
from aotllm.structured_outputs import StructuredOutputs
from aotllm.triton_tensors.inputs import Options, read_inputs, same_for_all
from aotllm.triton_tensors.models import TensorModel
from aotllm.triton_tensors.output_fields import ALWAYS, FLAGS, INDEXES
from aotllm.triton_tensors.sampling import sampling_of
from aotllm.triton_tensors.tensors import InputTensor

if TYPE_CHECKING:
    from aotllm.tokenization import Tokenizer

_REQUEST = ("priority", "cache_salt", "retention_priority")
"""Parameters of a request that are fields of `Request`; `timeout` is one in other units"""
_GUIDES = {"json": "json_object", "json_schema": "json", "regex": "regex", "ebnf_grammar": "grammar"}


@dataclass(frozen=True)
class Target:
    """What a request goes to."""

    tensors: TensorModel
    tokenizer: Tokenizer
    end_token_ids: Sequence[int]
    """Of the engine"""
    exclude_input_in_output: bool
    """Unless the client says"""
    max_prompts: int
    adapter: str | None = None


@dataclass
class Generation:
    """One per request of a client; all prompts of it together."""

    target: Target
    requests: list[Request]
    n: int
    """Answers per prompt"""
    beams: BeamSearchParams | None
    stream: bool
    """A response for each step, else one for all"""
    exclude_input: bool
    """Of an answer that does not stream: without the prompt in front of it"""
    pad_id: int
    """Fills up `output_ids`"""
    outputs: frozenset[str]
    """Names of the tensors to give"""


def generation_of(
    inputs: Sequence[InputTensor],
    parameters: Mapping[str, Any],
    target: Target,
    outputs: frozenset[str] = frozenset(),
    listing_asks: bool = True,
    stream: bool = False,
) -> Generation:
    """What to do.

    Args:
        inputs: the tensors that were given.
        parameters: of the request: inputs by other means, fields of `Request`, `timeout` in microseconds.
        target: what they go to.
        outputs: names of the tensors that the client lists; empty = those that its inputs ask for.
        listing_asks: to list an output is to ask for it. Else what is listed has to be asked for by an input, too:
            Triton lists all outputs where the client lists none.
        stream: unless the client says.

    Raises:
        InvalidRequest: names the tensor or parameter that is wrong.
    """
    known = target.tensors.outputs
    for name in outputs:
        if name not in known:
            raise InvalidRequest(
                f"there is no output {name!r:.80}; the outputs of this model are {', '.join(known)}", name[:80]
            )
    prompts = read_inputs(inputs, parameters, target.tensors, target.max_prompts)
    asked = _asked(prompts, target.tensors)
    if not outputs:
        outputs = asked
    elif not listing_asks:
        outputs &= asked | INDEXES
    streams = same_for_all(prompts, "stream", stream)
    beam_width = same_for_all(prompts, "beam_width", 1)
    n = same_for_all(prompts, "n", max(1, beam_width))
    beams = _beams(prompts, beam_width, streams)
    if streams and (n > 1 or len(prompts) > 1):
        outputs |= INDEXES
    ids = [same_for_all(prompts, name, -1) for name in ("pad_id", "end_id")] + [*target.end_token_ids, 0]
    return Generation(
        target=target,
        requests=[_request(row, parameters, target, n, outputs) for row in prompts],
        n=n,
        beams=beams,
        stream=streams,
        exclude_input=same_for_all(prompts, "exclude_input_in_output", target.exclude_input_in_output),
        pad_id=next(token_id for token_id in ids if token_id >= 0),
        outputs=outputs,
    )


def _asked(prompts: Sequence[Options], model: TensorModel) -> frozenset[str]:
    """Names of the outputs that the inputs `return_…` ask for, and those that need no asking for."""
    names = {name for name in ALWAYS if name in model.outputs}
    for flag, asked in FLAGS.items():
        if same_for_all(prompts, flag, False):
            names |= set(asked)
    return frozenset(names)


def _beams(prompts: Sequence[Options], beam_width: int, streams: bool) -> BeamSearchParams | None:
    """None where there is no search: `length_penalty` and `early_stopping` mean nothing then. Their defaults are those
    of TensorRT-LLM."""
    if beam_width == 1:
        return None
    if streams:
        raise InvalidRequest("beam search cannot stream: its answers are known at the end only", "beam_width")
    return BeamSearchParams(
        beam_width=beam_width,
        length_penalty=same_for_all(prompts, "length_penalty", 0.0),
        early_stopping=str(same_for_all(prompts, "early_stopping", True)).lower(),
    )


def _request(row: Options, parameters: Mapping[str, Any], target: Target, n: int, outputs: frozenset[str]) -> Request:
    prompt = {"prompt_token_ids": _ids(row)} if "input_ids" in row else {"prompt": row["text_input"]}
    given = {name: parameters[name] for name in _REQUEST if name in parameters}
    if "timeout" in parameters:
        given["timeout"] = _timeout(parameters["timeout"])
    logprobs = "cum_log_probs" in outputs or "output_log_probs" in outputs
    return Request(
        **prompt,
        **given,
        sampling=sampling_of(row, n, logprobs, target.tokenizer, target.end_token_ids),
        structured_outputs=_form(row),
        return_logits="generation_logits" in outputs,
        adapter=target.adapter,
    )


def _ids(row: Options) -> list[int]:
    ids = row["input_ids"]
    length = row.get("input_lengths", len(ids))
    if not 1 <= length <= len(ids):
        raise InvalidRequest(
            f"input_lengths must be 1 to {len(ids)}, the length of input_ids, got {length}", "input_lengths"
        )
    return list(ids[:length])


def _timeout(value: Any) -> float | None:
    """Seconds out of microseconds; 0 = none."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
        raise InvalidRequest(f"timeout must be an integer ≥ 0, in microseconds, got {value!r:.60}", "timeout")
    return value / 1e6 or None


def _form(row: Options) -> StructuredOutputs | None:
    """The form of the answer, out of the tensors of guided decoding."""
    kind, guide = row.get("guided_decoding_guide_type", ""), row.get("guided_decoding_guide", "")
    if not kind and not guide:
        return None
    if kind not in _GUIDES:
        raise InvalidRequest(
            f"guided_decoding_guide_type must be one of {', '.join(_GUIDES)}, got {kind!r:.60}",
            "guided_decoding_guide_type",
        )
    value: Any = True if kind == "json" else guide
    return StructuredOutputs(**{_GUIDES[kind]: value}, param="guided_decoding_guide")
