"""`RayOptions`: how replicas are placed, scaled and chosen."""

from __future__ import annotations

from dataclasses import dataclass

from aotllm.errors import InvalidRequest
from aotllm.parameters import ParameterSpec, check_parameters, documented, parameter


@documented
@dataclass(frozen=True)
class RayOptions:
    """Each field is declared here and nowhere else, so that flags can be generated from it.

    Raises:
        InvalidRequest: a value is out of range; `param` names it.
    """

    ray_address: str | None = parameter(
        None,
        ParameterSpec("Ray cluster to join, host:port or auto; None = one of this machine only.", str, optional=True),
    )
    min_replicas: int = parameter(1, ParameterSpec("Fewest replicas.", int, low=1, high=10_000))
    max_replicas: int = parameter(
        1, ParameterSpec("Most replicas; more than min_replicas = scaled by their load.", int, low=1, high=10_000)
    )
    target_ongoing_requests: float = parameter(
        16.0,
        ParameterSpec(
            "Requests, running and waiting, of a replica that are as they should be: above the mean of it replicas are "
            "added, below taken away.",
            float,
            low=0.0,
            low_open=True,
        ),
    )
    max_ongoing_requests: int = parameter(
        256, ParameterSpec("Most requests that a replica is sent; others wait in front.", int, low=1, high=2**31 - 1)
    )
    cpus_per_replica: float = parameter(
        1.0, ParameterSpec("CPUs that Ray sets aside for a replica.", float, low=0.0, high=100_000.0)
    )
    gpus_per_replica: float = parameter(
        0.0, ParameterSpec("GPUs that Ray sets aside for a replica.", float, low=0.0, high=1000.0)
    )
    num_front_ends: int = parameter(
        1, ParameterSpec("Processes that choose a replica for each request.", int, low=1, high=1000)
    )
    prefix_chars: int = parameter(
        512,
        ParameterSpec(
            "First characters of a prompt that requests must have in common to be sent to one replica.",
            int,
            low=1,
            high=2**20,
        ),
    )
    load_bound: float = parameter(
        1.25,
        ParameterSpec(
            "A replica gets what its cache is good for up to this multiple of the mean load.",
            float,
            low=1.0,
            low_open=True,
            high=100.0,
        ),
    )
    free_load: int = parameter(
        4, ParameterSpec("And in any case up to this many requests at a time.", int, low=1, high=2**31 - 1)
    )

    def __post_init__(self) -> None:
        check_parameters(self)
        if self.max_replicas < self.min_replicas:
            raise InvalidRequest(
                f"max_replicas must be at least min_replicas, which is {self.min_replicas}, got {self.max_replicas}",
                "max_replicas",
            )
