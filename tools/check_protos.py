"""Hold the gRPC API's .proto files against the rules, and against what clients were built with.

`python -m tools.check_protos` says what is wrong; with `--accept` what there is now becomes what later changes are held
against: after a release, or before one for what nobody was ever given.
"""

from __future__ import annotations

import sys
import tempfile
from importlib.resources import files
from pathlib import Path
from typing import Final

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from grpc_tools import protoc  # type: ignore[import-untyped]  # it ships no types

from tools.generate_protos import PROTO_ROOT
from tools.proto_rules import breaking, lint

ACCEPTED: Final = Path(__file__).parent / "raypd_v1.binpb"
"""A FileDescriptorSet without comments."""


def main() -> int:
    """Print what is wrong; returns how many things."""
    now = read_protos()
    problems = lint(now) + breaking(accepted(), now)
    for problem in problems:
        print(problem)
    if "--accept" in sys.argv[1:]:
        ACCEPTED.write_bytes(without_comments(now).SerializeToString(deterministic=True))
        print(f"accepted as {ACCEPTED.name}")
        return 0
    return len(problems)


def read_protos() -> FileDescriptorSet:
    """The files as they are, with their comments. Raises RuntimeError if protoc fails."""
    protos = sorted(str(path.relative_to(PROTO_ROOT)) for path in PROTO_ROOT.rglob("*.proto"))
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "descriptors.binpb"
        includes = [f"-I{PROTO_ROOT}", f"-I{files('grpc_tools') / '_proto'}"]
        if protoc.main(["protoc", *includes, "--include_source_info", f"--descriptor_set_out={out}", *protos]) != 0:
            raise RuntimeError(f"protoc failed on {', '.join(protos)}")
        return FileDescriptorSet.FromString(out.read_bytes())


def accepted() -> FileDescriptorSet:
    """Return what clients were built with; nothing before anything was accepted."""
    return FileDescriptorSet.FromString(ACCEPTED.read_bytes()) if ACCEPTED.exists() else FileDescriptorSet()


def without_comments(descriptors: FileDescriptorSet) -> FileDescriptorSet:
    """A copy that is smaller."""
    copy = FileDescriptorSet()
    copy.CopyFrom(descriptors)
    for file in copy.file:
        file.ClearField("source_code_info")
    return copy


if __name__ == "__main__":
    sys.exit(main())
