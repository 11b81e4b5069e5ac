"""Finding marker texts in text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence


def find_first(text: str, markers: Sequence[str]) -> tuple[int, str | None]:
    """Where the first marker begins, and which one it is.

    Where there is none: how much of the text can be no beginning of one, and None. The rest has to wait for more text.
    """
    found = [(at, marker) for marker in markers if (at := text.find(marker)) >= 0]
    if found:
        return min(found)
    return min((_begins(text, marker) for marker in markers), default=len(text)), None


def _begins(text: str, marker: str) -> int:
    """Where the end of the text may be the beginning of the marker."""
    at = text.find(marker[0], max(0, len(text) - len(marker) + 1))
    while at >= 0 and not marker.startswith(text[at:]):
        at = text.find(marker[0], at + 1)
    return len(text) if at < 0 else at
