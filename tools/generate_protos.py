"""Generate the Python code of the gRPC API, next to their .proto files: `python tools/generate_protos.py`.

The code is committed, because `ray job submit --working-dir .` must find it; tests/tools/ checks that it is what this
script makes. A .proto's own name stays raypd/v1/*.proto, as its clients know it, while the Python modules lie below
cluster/api/protos and are imported from the repository's root: so imports are rewritten. protoc writes no types
for services: their .pyi is written here, for grpc.aio.
"""

import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet, MethodDescriptorProto
from grpc_tools import protoc  # type: ignore[import-untyped]  # it ships no types

PROTO_ROOT = Path(__file__).resolve().parent.parent / "cluster" / "api" / "protos"
PYTHON_PACKAGE = "cluster.api.protos"


def main() -> None:
    """Generate in place and say what was written."""
    for path in generate(PROTO_ROOT):
        print(f"wrote {path.relative_to(PROTO_ROOT.parent.parent.parent)}")


def generate(out: Path) -> list[Path]:
    """Generate everything below out, and return the written files. Raises RuntimeError if protoc fails."""
    protos = sorted(str(path.relative_to(PROTO_ROOT)) for path in PROTO_ROOT.rglob("*.proto"))
    descriptor_set = out / "descriptors.bin"
    flags = [f"--{kind}={out}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
    includes = [f"-I{PROTO_ROOT}", f"-I{files('grpc_tools') / '_proto'}"]
    if protoc.main(["protoc", *includes, *flags, f"--descriptor_set_out={descriptor_set}", *protos]) != 0:
        raise RuntimeError(f"protoc failed on {', '.join(protos)}")
    descriptors = FileDescriptorSet.FromString(descriptor_set.read_bytes())
    descriptor_set.unlink()
    return [path for file in descriptors.file for path in _finish(file, out)]


def _finish(file: FileDescriptorProto, out: Path) -> Iterator[Path]:
    stem = out / file.name.removesuffix(".proto")
    generated = [stem.with_name(stem.name + suffix) for suffix in ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")]
    for path in generated:
        # protoc leaves a type argument out of its .pyi.
        header = '# mypy: disable-error-code="type-arg"\n' if path.suffix == ".pyi" else ""
        path.write_text(header + _with_root_imports(path.read_text()))
    types = stem.with_name(stem.name + "_pb2_grpc.pyi")
    types.write_text(_service_types(file))
    return iter([*generated, types])


def _with_root_imports(code: str) -> str:
    code = re.sub(r"^from raypd\.", f"from {PYTHON_PACKAGE}.raypd.", code, flags=re.MULTILINE)
    # The module's name as its message classes carry it: pickle imports them by it.
    return re.sub(r"'(raypd\.v\d+\.\w+_pb2)'", rf"'{PYTHON_PACKAGE}.\1'", code)


def _service_types(file: FileDescriptorProto) -> str:
    package, _, name = file.name.removesuffix(".proto").replace("/", ".").rpartition(".")
    lines = [
        f'"""The types of {name}_pb2_grpc.py, for grpc.aio. Made by tools/generate_protos.py: do not edit."""',
        "# ruff: noqa",
        "# fmt: off",
        "",
        "from collections.abc import AsyncIterator, Awaitable",
        "",
        "import grpc.aio",
        "",
        f"from {PYTHON_PACKAGE}.{package} import {name}_pb2",
    ]
    for service in file.service:
        methods = [_MethodTypes(method, f"{name}_pb2") for method in service.method]
        lines += ["", f"class {service.name}Stub:", "    def __init__(self, channel: grpc.aio.Channel) -> None: ..."]
        lines += [f"    {method.stub}" for method in methods]
        lines += ["", f"class {service.name}Servicer:"]
        lines += [f"    {method.servicer}" for method in methods]
        lines += [
            "",
            f"def add_{service.name}Servicer_to_server(",
            f"    servicer: {service.name}Servicer, server: grpc.aio.Server",
            ") -> None: ...",
        ]
    return "\n".join(lines) + "\n"


class _MethodTypes:
    """One rpc as its stub and its servicer declare it."""

    def __init__(self, method: MethodDescriptorProto, module: str) -> None:
        request, response = (f"{module}.{name.rpartition('.')[2]}" for name in (method.input_type, method.output_type))
        kinds = ("Stream" if method.client_streaming else "Unary") + ("Stream" if method.server_streaming else "Unary")
        self.stub = f"{method.name}: grpc.aio.{kinds}MultiCallable[{request}, {response}]"
        argument = f"request_iterator: AsyncIterator[{request}]" if method.client_streaming else f"request: {request}"
        # A streaming servicer is an async generator, or a coroutine that writes to its context.
        result = f"AsyncIterator[{response}] | Awaitable[None]" if method.server_streaming else f"Awaitable[{response}]"
        context = f"context: grpc.aio.ServicerContext[{request}, {response}]"
        self.servicer = f"def {method.name}(self, {argument}, {context}) -> {result}: ..."


if __name__ == "__main__":
    main()
