"""Packing a rank's tensors on all cores, and writing them one after the other."""

from __future__ import annotations

import collections
import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy.typing as npt

from aotllm.builder.targets.program import Part, RankProgram, TensorJob
from aotllm.engines.rank_file import RankFileWriter

_PARTS_AHEAD = 2
"""Parts per thread that may be finished or under way before their turn to be written"""


def write_rank(
    path: Path,
    program: RankProgram,
    done: Callable[[], None],
    num_threads: int | None = None,
    build_id: str | None = None,
) -> str:
    """Runs the jobs of `program` and writes the rank's file.

    Parts are packed on all cores (numpy leaves Python's lock alone meanwhile), some ahead of the one being written, so
    that packing, hashing and writing overlap in bounded memory. The file does not depend on the number of threads.

    Args:
        path: the file to make.
        program: plan and tensors.
        done: called from this thread after each tensor that counts as weights.
        num_threads: default: the cores of this process.
        build_id: what the ranks of one build have in common, and no others; default: the file stands alone.

    Returns:
        The file's SHA-256.
    """
    specs = {job.tensor: job.spec for job in program.tensors}
    threads = num_threads or len(os.sched_getaffinity(0))
    metadata = {"plan": json.dumps(program.plan, separators=(",", ":"))}
    if build_id is not None:
        metadata["build"] = build_id
    with RankFileWriter(path, specs, metadata) as writer, ThreadPoolExecutor(threads) as pool:
        packed = _packed(program.tensors, pool, threads * _PARTS_AHEAD)
        try:
            for job in program.tensors:
                writer.write_parts(job.tensor, (next(packed) for _ in job.parts))
                if job.weight_format is not None:
                    done()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        return writer.close()


def _packed(jobs: Sequence[TensorJob], pool: ThreadPoolExecutor, ahead: int) -> Iterator[npt.NDArray[Any]]:
    """The results of all parts in order, at most `ahead` of them not yet taken."""
    parts = ((job, part) for job in jobs for part in job.parts)
    waiting: collections.deque[Future[npt.NDArray[Any]] | Part] = collections.deque()

    def fill() -> None:
        while len(waiting) < ahead:
            following = next(parts, None)
            if following is None:
                return
            job, part = following
            waiting.append(part if job.in_order else pool.submit(part))

    fill()
    while waiting:
        head = waiting.popleft()
        result = head.result() if isinstance(head, Future) else head()
        fill()
        yield result
