"""`Chat`: the interactive mode of `aotllm run`."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from aotllm.cli.console import error_line, note
from aotllm.errors import InvalidRequest
from aotllm.request import Request

if TYPE_CHECKING:
    from aotllm.executor import Executor
    from aotllm.sampling_params import SamplingParams

_HELP = """\
/clear   forget the conversation
/exit    leave (also Ctrl-D)
/help    this list
Ctrl-C   stop the answer"""


class Chat:
    """A conversation on the terminal, or over piped stdin: one line in, one answer out.

    Args:
        executor: answers.
        sampling: for every answer.
        system: system message that starts each conversation.
        raw: no chat template: each line is continued on its own, without history.
        adapter: LoRA adapter of every answer.
    """

    def __init__(
        self, executor: Executor, sampling: SamplingParams, system: str | None, raw: bool, adapter: str | None = None
    ) -> None:
        self._executor = executor
        self._sampling = sampling
        self._opening = [{"role": "system", "content": system}] if system is not None else []
        self._raw = raw
        self._adapter = adapter
        self._messages = list(self._opening)
        self._terminal = sys.stdin.isatty()

    def loop(self) -> None:
        """Until /exit or the end of stdin."""
        if self._terminal:
            with suppress(ImportError):
                import readline  # noqa: F401 line editing and history for input()
            note("/help for help, Ctrl-D to leave")
        while (line := self._read()) is not None:
            text = line.strip()
            if text == "/exit":
                return
            if text == "/clear":
                self._messages = list(self._opening)
            elif text == "/help":
                note(_HELP)
            elif text.startswith("/") and " " not in text:
                note(f"unknown command {text}; /help lists them")
            elif text:
                self._answer(text)

    def _read(self) -> str | None:
        while True:
            try:
                return input("> " if self._terminal else "")
            except EOFError:
                return None
            except KeyboardInterrupt:
                if not self._terminal:
                    raise
                note("\nCtrl-D to leave")

    def _answer(self, text: str) -> None:
        """Stream one answer. A refused or stopped turn leaves the conversation usable."""
        messages = [*self._messages, {"role": "user", "content": text}]
        try:
            handle = self._executor.submit(
                Request(prompt=text, sampling=self._sampling, adapter=self._adapter)
                if self._raw
                else Request(messages=messages, sampling=self._sampling, adapter=self._adapter)
            )
        except InvalidRequest as error:
            error_line(f"{error.message} (/clear starts over)")
            return
        try:
            for output in handle:
                print(output.text, end="", flush=True)
        except KeyboardInterrupt:
            handle.cancel()
        print(flush=True)
        self._messages = [*messages, {"role": "assistant", "content": handle.result().text}]
