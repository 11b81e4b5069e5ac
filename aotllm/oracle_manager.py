"""`OracleManager`: the real runtime over a model that computes nothing, to load, soak and measure what is around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from aotllm.executor_config import ExecutorConfig
from aotllm.manager import ManagerRequest, RuntimeManager

if TYPE_CHECKING:
    from aotllm import _runtime


@dataclass(frozen=True)
class OracleModel:
    """A model whose next token is a function of the last one, its position and the adapter.

    It is a `ManagerFactory`: scheduler, KV cache, sampler and responses are the real ones, kernels and weights there
    are none. Only the tokenizer and the configuration of the engine's bundle are read.

        model = OracleModel(vocab_size=512)
        executor = Executor("smollm2-135m", manager_factory=model)
        ids = executor.generate("Once")[0].token_ids  # == model.answer(prompt_token_ids, len(ids))

    KV blocks are accounted, and shared, evicted and preempted over, but have no memory behind them. Speculation with a
    draft engine is possible as with any model, and useless.
    """

    vocab_size: int = 512
    """Tokens that are said are below this, at most the tokenizer's; those of prompts are taken modulo it. The sampler
    looks at each of them for each token"""
    max_seq_len: int = 4096
    """Prompt and answer together, in tokens"""
    max_batch_size: int = 256
    """Sequences in a step"""
    max_num_tokens: int = 8192
    """Tokens in a step; at least max_batch_size"""
    tokens_per_block: int = 16
    hidden_size: int = 64
    """Numbers in an embedding; 0 = there are none"""
    kv_windows: tuple[int, ...] = (0,)
    """A group of layers each, at most 4: tokens that it looks back, 0 = all; the widest first"""
    kv_bytes_per_token: int = 1
    """In each group; what sizes of KV memory in bytes are divided by"""
    spoken_tokens: tuple[int, ...] = ()
    """Tokens to choose from; none = all but the end tokens, so that only max_tokens ends an answer"""
    step_seconds: float = 0.0
    """A step sleeps until it has taken this long"""

    def __call__(
        self,
        rank_file: Path,
        config: ExecutorConfig,
        eos_token_ids: Sequence[int],
        draft_rank_file: Path | None = None,
    ) -> OracleManager:
        """A manager of this model; `rank_file` is not read. Raises InvalidRequest for a size out of range."""
        return OracleManager(self, config, eos_token_ids, draft_rank_file)

    def answer(
        self, prompt_token_ids: Sequence[int], count: int, eos_token_ids: Sequence[int] = (), adapter: int = 0
    ) -> list[int]:
        """The `count` tokens that follow a prompt, end tokens that `spoken_tokens` names being tokens like others.

        Args:
            prompt_token_ids: at least one.
            count: tokens.
            eos_token_ids: of the engine.
            adapter: id of the LoRA adapter in the runtime; 0 = none.
        """
        spoken = self.spoken_tokens or [t for t in range(self.vocab_size) if t not in eos_token_ids]
        tokens = [prompt_token_ids[-1] % self.vocab_size]
        for position in range(len(prompt_token_ids) - 1, len(prompt_token_ids) - 1 + count):
            # The formula of runtime_cpp/src/runner/oracle_runner.h.
            x = ((tokens[-1] << 32) + position) * 0x9E3779B97F4A7C15 + adapter * 0xD1B54A32D192ED03
            x %= 2**64
            tokens.append(spoken[(x ^ (x >> 32)) % len(spoken)])
        return tokens[1:]


class OracleManager(RuntimeManager):
    """`_runtime.GptManager` over an `OracleModel`."""

    def __init__(
        self,
        model: OracleModel,
        config: ExecutorConfig,
        eos_token_ids: Sequence[int],
        draft_rank_file: Path | None = None,
    ) -> None:
        self._model = model
        super().__init__(Path(), config, eos_token_ids, draft_rank_file)

    def submit(self, request: ManagerRequest) -> int:
        """See `Manager.submit`. The tokenizer may have more tokens than the model."""
        folded = [token % self._model.vocab_size for token in request.prompt_token_ids]
        return super().submit(replace(request, prompt_token_ids=folded))

    def _make(self, rank_file: Path, config: _runtime.ManagerConfig) -> _runtime.GptManager:
        from aotllm import _runtime

        model = self._model
        return _runtime.GptManager.with_oracle_runner(
            config,
            vocab_size=model.vocab_size,
            max_seq_len=model.max_seq_len,
            max_batch_size=model.max_batch_size,
            max_num_tokens=model.max_num_tokens,
            tokens_per_block=model.tokens_per_block,
            hidden_size=model.hidden_size,
            kv_windows=model.kv_windows,
            kv_bytes_per_token=model.kv_bytes_per_token,
            spoken_tokens=model.spoken_tokens,
            step_seconds=model.step_seconds,
        )
