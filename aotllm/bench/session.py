"""`BenchSession`: one `aotllm bench serve`, from the first contact with the server to the last point."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from aotllm.bench.arrivals import Arrivals
from aotllm.bench.backends.base import Backend, RequestSettings
from aotllm.bench.backends.kserve import DEFAULT_MODEL
from aotllm.bench.backends.kserve_http import KServeHttpBackend
from aotllm.bench.backends.openai import OpenAIBackend
from aotllm.bench.dataset import DatasetConversations, read_dataset
from aotllm.bench.http_client import HttpClient
from aotllm.bench.load import Conversations, LoadRun, LoadRunner, LoadShape
from aotllm.bench.measures import Measures
from aotllm.bench.options import LoadOptions, ReportOptions, TargetOptions, WorkloadOptions
from aotllm.bench.profiles import Profile, ProfileConversations, profile_of
from aotllm.bench.record import RequestFailed, RequestRecord
from aotllm.bench.result import BenchContext, BenchPoint
from aotllm.bench.server_memory import ServerMemory
from aotllm.bench.soak import SoakMonitor
from aotllm.bench.target import calibrate, find_model, local_tokenizer, probe
from aotllm.bench.words import Words
from aotllm.errors import AotllmError

Tell = Callable[[str], None]


class BenchSession:
    """Measures one server.

    Args:
        target, workload, load, report: what was asked for.
        tell: takes a line for people while it goes on.
        on_end: called with the number of ended requests and of all in this run, None if unknown.
        on_point: called with each point of the sweep when it is there.

    Raises:
        AotllmError: bad options, or a server that does not answer the first request.
    """

    def __init__(
        self,
        target: TargetOptions,
        workload: WorkloadOptions,
        load: LoadOptions,
        report: ReportOptions,
        *,
        tell: Tell,
        on_end: Callable[[int, int | None], None] = lambda ended, all_: None,
        on_point: Callable[[BenchPoint], None] = lambda point: None,
    ) -> None:
        self._target, self._workload, self._load, self._report = target, workload, load, report
        self._tell, self._on_end, self._on_point = tell, on_end, on_point
        self._runner: LoadRunner | None = None
        self._interrupted = False

    async def run(self) -> list[BenchPoint]:
        """The points of the sweep; after Ctrl-C those that are there, the last one cut short."""
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        with suppress(NotImplementedError, RuntimeError, ValueError):  # no main thread, no signals
            loop.add_signal_handler(signal.SIGINT, self._interrupt, task)
        try:
            return await self._measure()
        except RequestFailed as error:
            raise AotllmError(f"no benchmark of {self._target.url}: {error.message}") from None
        finally:
            with suppress(NotImplementedError, RuntimeError, ValueError):
                loop.remove_signal_handler(signal.SIGINT)

    @property
    def interrupted(self) -> bool:
        """By Ctrl-C."""
        return self._interrupted

    def _interrupt(self, task: asyncio.Task[object]) -> None:
        """The first Ctrl-C ends the run and keeps what it has; without a run, or again, all ends."""
        if self._runner is None or self._interrupted:
            task.cancel()
        else:
            self._runner.stop()
        self._interrupted = True

    async def _measure(self) -> list[BenchPoint]:
        target = self._target
        connection = _Connection.open(target)
        try:
            model, limit = await connection.model(target.model)
            self._settings = RequestSettings(
                model=model,
                temperature=target.temperature,
                ignore_eos=target.ignore_eos if target.ignore_eos is not None else self._workload.dataset is None,
                continuous_usage=target.continuous_usage,
                extra_body=target.extra_fields(),
            )
            self._settings, _ = await probe(connection.backend, self._settings, self._tell)
            conversations, lengths_by = await self._conversations(connection, limit)
            context = BenchContext(
                backend=connection.backend.name,
                url=target.url,
                model=model,
                workload=self._workload.dataset or self._workload.profile_name,
                lengths_by=lengths_by,
                tokenizer=self._workload.tokenizer,
                seed=self._load.seed,
                metrics=self._report.metrics(),
                detailed=self._report.detailed,
            )
            return await self._sweep(connection, conversations, context)
        finally:
            await connection.close()

    async def _conversations(self, connection: _Connection, limit: int | None) -> tuple[Conversations, str]:
        workload = self._workload
        count = local_tokenizer(Path(workload.tokenizer)) if workload.tokenizer else None
        if workload.dataset is not None:
            # Without a tokenizer, four characters of text are a token: the lengths of answers need no more.
            found = read_dataset(
                Path(workload.dataset),
                count=count or (lambda text: max(1, len(text) // 4)),
                output_len=workload.output_len,
                multi_turn=workload.profile == "multi-turn",
            )
            how = "counted by the local tokenizer" if count else "estimated, four characters a token"
            return DatasetConversations(found, self._load.seed), how
        profile = profile_of(
            workload.profile_name,
            input_len=workload.input_len,
            output_len=workload.output_len,
            turns=workload.turns,
            prefix_len=workload.prefix_len,
            range_ratio=workload.range_ratio,
        )
        self._warn_of_context(profile, limit)
        words: Words = await calibrate(connection.backend, self._settings, connection.client, count)
        return ProfileConversations(profile, words, self._load.seed), words.origin

    def _warn_of_context(self, profile: Profile, limit: int | None) -> None:
        if limit is not None and profile.most_tokens() > limit:
            self._tell(
                f"conversations of up to {profile.most_tokens()} tokens exceed the model's context of {limit}: some "
                "requests will be refused; see --input-len, --output-len, --prefix-len and --turns"
            )

    async def _sweep(
        self, connection: _Connection, conversations: Conversations, context: BenchContext
    ) -> list[BenchPoint]:
        points: list[BenchPoint] = []
        begun = await self._warm_up(connection.backend, conversations)
        for arrivals in self._load.sweep_arrivals():
            for concurrency in self._load.sweep_concurrencies():
                if self._interrupted:
                    return points
                # Each point has conversations of its own: those of the one before are in the server's prefix cache.
                shape = replace(self._shape(arrivals, concurrency), first_conversation=begun)
                point = await self._point(connection, conversations, context, shape)
                begun += point.run.conversations
                points.append(point)
                self._on_point(point)
        return points

    def _shape(self, arrivals: Arrivals, concurrency: int | None) -> LoadShape:
        return LoadShape(
            num_prompts=self._load.prompts,
            duration=self._load.seconds,
            arrivals=arrivals,
            concurrency=concurrency,
            think_time=self._workload.think_time,
            timeout=self._target.timeout,
            seed=self._load.seed,
        )

    async def _warm_up(self, backend: Backend, conversations: Conversations) -> int:
        """Returns how many conversations that took."""
        if not self._load.warmups:
            return 0
        limit = max((c or 1 for c in self._load.sweep_concurrencies()), default=1)
        shape = LoadShape(num_prompts=self._load.warmups, concurrency=limit, timeout=self._target.timeout)
        run = await self._run(LoadRunner(backend, self._settings, conversations, shape, keep_texts=False))
        failed = [record.error for record in run.records if record.error is not None]
        if failed:
            self._tell(f"{len(failed)} of {len(run.records)} warm-up requests failed: {failed[0].message}")
        return run.conversations

    async def _point(
        self, connection: _Connection, conversations: Conversations, context: BenchContext, shape: LoadShape
    ) -> BenchPoint:
        soak = self._soak_monitor(connection) if self._load.soak is not None else None
        ended = 0

        def on_end(record: RequestRecord) -> None:
            nonlocal ended
            ended += 1
            self._on_end(ended, shape.num_prompts)
            if soak is not None:
                soak.add(record)

        date = datetime.now()
        runner = LoadRunner(
            connection.backend, self._settings, conversations, shape, keep_texts=context.detailed, on_end=on_end
        )
        watching = asyncio.ensure_future(soak.run()) if soak is not None else None
        run = await self._run(runner)
        if watching is not None:
            watching.cancel()
            await asyncio.wait({watching})
        percents = self._report.percents()
        measures = Measures.of(run.records, run.started, run.duration, self._report.objectives(), percents)
        return BenchPoint(context, shape.arrivals, shape.concurrency, run, measures, date, soak)

    async def _run(self, runner: LoadRunner) -> LoadRun:
        self._runner = runner
        try:
            return await runner.run()
        finally:
            self._runner = None

    def _soak_monitor(self, connection: _Connection) -> SoakMonitor:
        return SoakMonitor(connection.memory(self._report).read, self._tell)


class _Connection:
    """A backend, and the HTTP client beside it where the server has HTTP."""

    def __init__(self, backend: Backend, client: HttpClient | None, headers: dict[str, str], insecure: bool) -> None:
        self.backend, self.client, self._headers, self._insecure = backend, client, headers, insecure
        self._others: list[HttpClient] = []

    @classmethod
    def open(cls, target: TargetOptions) -> _Connection:
        headers = target.headers()
        key = target.api_key or os.environ.get("OPENAI_API_KEY")
        if key:
            headers.setdefault("Authorization", f"Bearer {key}")
        if target.backend == "kserve-grpc":
            from aotllm.bench.backends.kserve_grpc import KServeGrpcBackend

            return cls(KServeGrpcBackend(target.url, headers), None, headers, target.insecure)
        url = target.url.rstrip("/").removesuffix("/v1")
        client = HttpClient(url if "://" in url else f"http://{url}", headers, insecure=target.insecure)
        return cls(_http_backend(target, client), client, headers, target.insecure)

    async def model(self, name: str | None) -> tuple[str, int | None]:
        """Name and context length, where the server says it."""
        if self.client is None or self.backend.name == "kserve-http":
            return name or DEFAULT_MODEL, None
        card = await find_model(self.client, name)
        return card.name, card.max_model_len

    def memory(self, report: ReportOptions) -> ServerMemory:
        """By process id, by the page that was named, or by the server's own."""
        if report.server_pid is not None or (report.metrics_url is None and self.client is None):
            return ServerMemory(report.server_pid)
        if report.metrics_url is None:
            assert self.client is not None
            return ServerMemory(None, (self.client, "/metrics"))
        client = HttpClient(report.metrics_url, self._headers, insecure=self._insecure)
        self._others.append(client)
        return ServerMemory(None, (client, ""))

    async def close(self) -> None:
        """Drop all connections."""
        for client in self._others:
            client.close()
        await self.backend.close()


def _http_backend(target: TargetOptions, client: HttpClient) -> Backend:
    if target.backend == "kserve-http":
        return KServeHttpBackend(client, target.endpoint)
    return OpenAIBackend(client, chat=target.backend == "openai-chat", endpoint=target.endpoint)
