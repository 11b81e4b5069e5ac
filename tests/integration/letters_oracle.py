"""An oracle model that speaks few tokens, for servers in tests: `manager_factory=FACTORY`."""

from __future__ import annotations

from aotllm.oracle_manager import OracleModel

FACTORY = f"{__name__}:letters"

letters = OracleModel(vocab_size=256, spoken_tokens=tuple(range(65, 91)), step_seconds=0.002, max_batch_size=64)
"""Tokens that are one character each in every byte-level vocabulary"""
