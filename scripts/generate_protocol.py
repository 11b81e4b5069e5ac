#!/usr/bin/env python3
"""Compiles `open_inference.proto` into a Python module with its serialized descriptor. Needs grpcio-tools."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from package_tree import ROOT

FOLDER = ROOT / "aotllm" / "serving" / "kserve" / "protocol"
SOURCE = FOLDER / "open_inference.proto"
TARGET = FOLDER / "descriptor.py"

_HEAD = '''"""Generated from open_inference.proto by scripts/generate_protocol.py: do not edit."""

FILE_DESCRIPTOR = bytes.fromhex(
'''


def compiled() -> bytes:
    """The serialized FileDescriptorProto, without source locations."""
    from google.protobuf.descriptor_pb2 import FileDescriptorSet
    from grpc_tools import protoc

    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "descriptors"
        code = protoc.main(["protoc", f"-I{FOLDER}", f"--descriptor_set_out={output}", str(SOURCE)])
        if code != 0:
            raise SystemExit(f"{SOURCE.name} does not compile")
        descriptors = FileDescriptorSet.FromString(output.read_bytes())
    return descriptors.file[0].SerializeToString(deterministic=True)


def module(descriptor: bytes) -> str:
    """Source of the module, in the form of `ruff format`."""
    hexadecimal = descriptor.hex()
    width = 96
    lines = [hexadecimal[start : start + width] for start in range(0, len(hexadecimal), width)]
    body = "".join(f'    "{line}"\n' for line in lines)
    return f'{_HEAD}{body})\n"""A serialized FileDescriptorProto"""\n'


def main() -> int:
    """Writes the module; with --check, tells by the exit code whether it is up to date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if the module is out of date")
    source = module(compiled())
    if parser.parse_args().check:
        return int(TARGET.read_text() != source)
    TARGET.write_text(source)
    return 0


if __name__ == "__main__":
    sys.exit(main())
