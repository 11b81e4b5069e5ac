"""`library_errors`: failures of the tokenizers library as errors of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from aotllm.errors import AotllmError


@contextmanager
def library_errors(make: Callable[[str], AotllmError]) -> Iterator[None]:
    """Raise `make(reason)` where the body fails inside the library.

    The library raises plain `Exception`s, and where damaged data makes its Rust code panic, a `PanicException`, which
    no `except Exception` catches and which would take a server down.
    """
    try:
        yield
    except Exception as error:
        raise make(str(error)) from None
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise make(f"the tokenizers library panicked: {error}") from None
