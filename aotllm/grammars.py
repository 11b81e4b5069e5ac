"""`Grammars`: compiled grammars of one engine."""

from __future__ import annotations

import importlib.util
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from aotllm.errors import EngineIncompatible
from aotllm.structured_outputs import Grammar, StructuredOutputs

if TYPE_CHECKING:
    from aotllm import _runtime
    from aotllm.tokenization import Tokenizer


class Grammars:
    """Compiles what requests ask for, and remembers the latest ones. Thread-safe.

    Args:
        tokenizer: the engine's.
        eos_token_ids: tokens that end an answer.
        vocab_size: width of the logits.
        capacity: how many compiled grammars are remembered.
    """

    def __init__(
        self, tokenizer: Tokenizer, eos_token_ids: Sequence[int], vocab_size: int, capacity: int = 128
    ) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._vocab_size = vocab_size
        self._capacity = capacity
        self._lock = threading.Lock()
        self._compiler: _runtime.GrammarCompiler | None = None
        self._compiled: OrderedDict[Grammar, _runtime.Constraint] = OrderedDict()

    def compile(self, form: StructuredOutputs) -> _runtime.Constraint:
        """The start state for `form`. Clone it; it is shared.

        Raises:
            InvalidRequest: the grammar is malformed, too large, or cannot be met.
            Overloaded: too many others are taking too long to compile.
            EngineIncompatible: the library that compiles grammars cannot be used here.
        """
        return self.compile_grammar(form.to_grammar())

    def compile_grammar(self, grammar: Grammar) -> _runtime.Constraint:
        """`compile` for a form in the compiler's terms; raises the same."""
        with self._lock:
            known = self._compiled.get(grammar)
            if known is not None:
                self._compiled.move_to_end(grammar)
                return known
            if self._compiler is None:
                self._compiler = self._make_compiler()
        # Not under the lock: a grammar that takes long holds up no other. Two threads may compile the same one.
        compiled = self._compiler.compile(*grammar)
        with self._lock:
            self._compiled[grammar] = compiled
            while len(self._compiled) > self._capacity:
                self._compiled.popitem(last=False)
        return compiled

    def _make_compiler(self) -> _runtime.GrammarCompiler:
        from aotllm import _runtime

        vocabulary = self._tokenizer.byte_vocabulary
        size = min(self._tokenizer.vocab_size, self._vocab_size)
        tokens = [vocabulary.token_bytes(i) if vocabulary.is_text(i) else b"" for i in range(size)]
        return _runtime.GrammarCompiler(str(library_path()), tokens, list(self._eos_token_ids), self._vocab_size)


def library_path() -> Path:
    """The shared library inside the Python package llguidance, whose C functions the runtime calls.

    Raises:
        EngineIncompatible: the package is missing.
    """
    package = importlib.util.find_spec("llguidance")
    folders = list(package.submodule_search_locations or ()) if package is not None else []
    for folder in folders:
        for path in sorted(Path(folder).glob("_lib*.so")):
            return path
    raise EngineIncompatible(
        "constrained output needs the Python package llguidance, which is not installed; install it with: "
        "pip install 'llguidance>=1.8,<2'"
    )
