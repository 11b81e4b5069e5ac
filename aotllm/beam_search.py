"""Beam search: the most likely answers as a whole, rather than token by token.

The semantics are those of Hugging Face's `generate(num_beams=…)`, so that answers are the same.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from aotllm.parameters import ParameterSpec, check_parameters, documented, parameter
from aotllm.request import FinishReason, TokenLogprob

MAX_BEAM_WIDTH = 64


@documented
@dataclass(frozen=True)
class BeamSearchParams:
    """How beams are kept and compared. `SamplingParams` says when they end: max_tokens, stop_token_ids, ignore_eos."""

    beam_width: int = parameter(
        4,
        ParameterSpec("Answers in progress that are kept at each step; 1 = greedy.", int, low=1, high=MAX_BEAM_WIDTH),
    )
    length_penalty: float = parameter(
        1.0,
        ParameterSpec(
            "Answers are compared by log-probability / length ** length_penalty: above 0 favours longer ones.",
            float,
            low=-10.0,
            high=10.0,
        ),
    )
    early_stopping: str = parameter(
        "false",
        ParameterSpec(
            "true: end with the beam_width-th finished answer; false: when the best one in progress, at its present "
            "length, is worse than all of them; never: when it could not become better at any length.",
            str,
            choices=("true", "false", "never"),
        ),
    )

    def __post_init__(self) -> None:
        if isinstance(self.early_stopping, bool):
            object.__setattr__(self, "early_stopping", str(self.early_stopping).lower())
        check_parameters(self)


@dataclass(frozen=True)
class Beam:
    """An answer in progress."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    cumulative_logprob: float = 0.0


@dataclass(frozen=True)
class Hypothesis:
    """An answer that has ended."""

    beam: Beam
    score: float
    finish_reason: FinishReason


@dataclass
class BeamSearch:
    """The state of one search. The model is asked by the caller: for each beam of `live`, in order, the `num_top` most
    likely next tokens go to `advance`, until `done`.

    Equal scores are decided by the order of beams, then of token ids: the same search gives the same answers.

    Args:
        params: how to search.
        max_tokens: longest answer, its end token included; ≥ 1.
        end_token_ids: tokens that end an answer.
    """

    params: BeamSearchParams
    max_tokens: int
    end_token_ids: Collection[int]
    live: list[Beam] = field(default_factory=lambda: [Beam()])
    """Best first; empty when the search has ended"""
    finished: list[Hypothesis] = field(default_factory=list)
    """Best first, at most beam_width"""

    @property
    def done(self) -> bool:
        """`finished` is the answer."""
        return not self.live

    @property
    def num_top(self) -> int:
        """Next tokens needed of each beam: enough to fill all beams if every end token is among the most likely."""
        return self.params.beam_width + len(self.end_token_ids)

    def advance(self, tops: Sequence[TokenLogprob]) -> None:
        """One step.

        Args:
            tops: per live beam its most likely next tokens (`top`), most likely first.
        """
        width = self.params.beam_width
        candidates = [
            (beam.cumulative_logprob + logprob, rank, token_id, logprob)
            for rank, (beam, entry) in enumerate(zip(self.live, tops, strict=True))
            for token_id, logprob in entry.top
            if logprob > -math.inf
        ]
        candidates.sort(key=lambda candidate: (-candidate[0], candidate[1], candidate[2]))
        at_limit = len(self.live[0].token_ids) + 1 == self.max_tokens
        live: list[Beam] = []
        for place, (total, rank, token_id, logprob) in enumerate(candidates):
            ended = token_id in self.end_token_ids
            if len(live) == width or (place >= width and at_limit):
                break
            if ended and place >= width:
                continue  # not among the best: only those may end
            parent, entry = self.live[rank], TokenLogprob(token_id, logprob, tops[rank].top)
            beam = Beam((*parent.token_ids, token_id), (*parent.logprobs, entry), total)
            if ended or at_limit:
                self._finish(beam, "stop" if ended else "length")
            else:
                live.append(beam)
        self.live = live
        self.finished = self.finished[:width]
        if live and self._full() and not self._can_improve():
            self.live = []

    def cut(self, reason: FinishReason) -> None:
        """End now, with the beams as they are."""
        for beam in self.live:
            self._finish(beam, reason)
        self.live = []
        self.finished = self.finished[: self.params.beam_width]

    def _finish(self, beam: Beam, reason: FinishReason) -> None:
        self.finished.append(Hypothesis(beam, self._score(beam.cumulative_logprob, len(beam.token_ids)), reason))
        self.finished.sort(key=lambda hypothesis: -hypothesis.score)  # stable: the earlier one of equals stays first

    def _full(self) -> bool:
        return len(self.finished) == self.params.beam_width

    def _can_improve(self) -> bool:
        if self.params.early_stopping == "true":
            return False
        length = len(self.live[0].token_ids)
        if self.params.early_stopping == "never" and self.params.length_penalty > 0:
            length = self.max_tokens
        return self._score(self.live[0].cumulative_logprob, length) > self.finished[-1].score

    def _score(self, cumulative_logprob: float, length: int) -> float:
        return cumulative_logprob / float(max(length, 1) ** self.params.length_penalty)
