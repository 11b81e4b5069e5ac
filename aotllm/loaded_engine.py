"""`LoadedEngine`: an engine with the manager that runs it, its adapters and its grammars."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from aotllm.adapters import AdapterTable
from aotllm.draft_engine import open_draft_engine
from aotllm.executor_config import ExecutorConfig
from aotllm.grammars import Grammars
from aotllm.manager import ManagerFactory, RuntimeManager

if TYPE_CHECKING:
    from aotllm.engines import Engine
    from aotllm.tokenization import Tokenizer


class LoadedEngine:
    """What an executor and an engine process have in common.

    Args:
        engine: folder of an engine bundle, or an opened one.
        config: sizes and policies.
        verify: compare the digests of the bundle's files, unless they are known; else only their sizes.
        manager_factory: makes the in-flight-batching loop; None = the compiled one.

    Raises:
        EngineError: the bundle, or that of the draft engine, is missing or damaged.
        EngineIncompatible: it was built for another machine or version, or cannot draft for the other.
        InvalidRequest: an option is out of range.
    """

    def __init__(
        self, engine: str | Path | Engine, config: ExecutorConfig, verify: bool, manager_factory: ManagerFactory | None
    ) -> None:
        if isinstance(engine, (str, Path)):
            from aotllm.engines import open_engine

            engine = open_engine(engine, verify="beside" if verify else False)
        self.engine = engine
        try:
            self._load(config, verify, manager_factory or RuntimeManager)
        except Exception:
            self._finish_verification()  # which says more than what a damaged file looks like
            raise
        self._finish_verification()
        self.adapters = AdapterTable(self.manager)
        self.grammars = Grammars(self.tokenizer, engine.manifest.eos_token_ids, self.manager.vocab_size)

    def _load(self, config: ExecutorConfig, verify: bool, manager_factory: ManagerFactory) -> None:
        engine = self.engine
        self.tokenizer: Tokenizer = engine.tokenizer()
        draft_rank_file = None
        if config.draft_engine is not None:
            draft_rank_file = open_draft_engine(config.draft_engine, engine, self.tokenizer, verify).rank_file(0)
        self.manager = manager_factory(engine.rank_file(0), config, engine.manifest.eos_token_ids, draft_rank_file)

    def _finish_verification(self) -> None:
        if self.engine.verification is not None:
            self.engine.verification.finish()
