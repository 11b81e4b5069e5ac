"""`PrefixRouter`: Ray Serve's way to a replica, by `PrefixAffinity`."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from aotllm.serving.ray.prefix_affinity import PrefixAffinity


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types here
    """Requests say by the argument `routing_key` what they have in common; None is for any replica.

    Loads are those that this router has sent and that have not ended. Where several front ends route, each of them
    keeps to its share of the bound, and so do all together. The most that a replica takes at all, Ray's
    `max_ongoing_requests`, is looked after by the base class.
    """

    def initialize_state(self, load_bound: float = 1.25, free_load: int = 4) -> None:
        """Called by Ray with the `request_router_kwargs`."""
        self._affinity = PrefixAffinity(load_bound, free_load)
        self._running: dict[str, str] = {}
        """Request -> replica"""
        self._loads: Counter[str] = Counter()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The best replica first, each in a rank of its own: the next one is for when it takes no more."""
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        key = pending_request.kwargs.get("routing_key") if pending_request is not None else None
        order = self._affinity.order(key, {name: self._loads[name] for name in replicas})
        return [[replicas[name]] for name in order]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Called by Ray when a replica has taken a request."""
        self._running[pending_request.metadata.internal_request_id] = replica_id.unique_id
        self._loads[replica_id.unique_id] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Called by Ray when a request has ended, however; also one that a replica refused to take."""
        replica = self._running.pop(internal_request_id, None)
        if replica is not None:
            self._loads[replica] -= 1

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Ray when replicas come or go."""
        super().update_replicas(replicas)
        there = {replica.replica_id.unique_id for replica in replicas}
        for name in set(self._loads) - there:
            if self._loads[name] <= 0:
                del self._loads[name]
