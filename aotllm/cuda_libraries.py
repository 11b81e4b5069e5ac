"""Where NVIDIA's libraries lie that PyPI's packages bring: the dynamic loader does not look there."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def find_cublaslt() -> str:
    """Path of libcublasLt of the package nvidia-cublas (extra `cuda`); empty where it is not installed, so that the
    loader's own search decides."""
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        for pattern in ("cu*/lib/libcublasLt.so.*", "cublas/lib/libcublasLt.so.*"):
            found = sorted(Path(folder).glob(pattern))
            if found:
                return str(found[-1])
    return ""
