import pickle
from pathlib import Path

from google.protobuf.descriptor import FileDescriptor

from actors.core.request import RequestStatus
from cluster.ingress.protos.raypd.v1 import embed_pb2, generate_pb2, model_pb2
from tools import generate_protos


def test_committed_code_is_what_the_protos_generate(tmp_path: Path) -> None:
    generated = generate_protos.generate(tmp_path)

    committed = sorted(generate_protos.PROTO_ROOT.rglob("*_pb2*.py*"))
    committed = [path for path in committed if "__pycache__" not in path.parts]
    assert [path.relative_to(generate_protos.PROTO_ROOT) for path in committed] == sorted(
        path.relative_to(tmp_path) for path in generated
    )
    for path in generated:
        assert (generate_protos.PROTO_ROOT / path.relative_to(tmp_path)).read_bytes() == path.read_bytes(), (
            f"{path.name} is not what its .proto says: run `make proto`"
        )


def test_a_descriptor_keeps_the_name_that_clients_know() -> None:
    assert generate_pb2.DESCRIPTOR.name == "raypd/v1/generate.proto"
    assert generate_pb2.DESCRIPTOR.package == "raypd.v1"


def test_a_message_survives_pickling() -> None:
    message = generate_pb2.ChatMessage(role="user", content="hello")

    assert pickle.loads(pickle.dumps(message)) == message


def test_statuses_on_the_wire_are_the_schedulers() -> None:
    names = {name: number for name, number in generate_pb2.RequestStatus.items() if number}

    assert names == {f"REQUEST_STATUS_{status.name}": status.value for status in RequestStatus}


def _undocumented(path: Path) -> list[str]:
    """The lines of a .proto that declare something, with no comment above it."""
    lines = [line.strip() for line in path.read_text().splitlines()]
    declares = [
        index
        for index, line in enumerate(lines)
        if line and not line.startswith(("//", "syntax", "package", "import", "}")) and not line.startswith("oneof")
    ]
    return [lines[index] for index in declares if not lines[index - 1].startswith("//")]


def test_every_message_field_and_rpc_is_documented() -> None:
    protos = list(generate_protos.PROTO_ROOT.rglob("*.proto"))

    assert protos
    assert {path.name: _undocumented(path) for path in protos} == {path.name: [] for path in protos}


def test_names_follow_bufs_standard_rules() -> None:
    files: list[FileDescriptor] = [embed_pb2.DESCRIPTOR, generate_pb2.DESCRIPTOR, model_pb2.DESCRIPTOR]
    for file in files:
        assert file.name.startswith(file.package.replace(".", "/") + "/")
        for name, service in file.services_by_name.items():
            assert name.endswith("Service")
            for method in service.methods:
                assert method.input_type.name == f"{method.name}Request"
                assert method.output_type.name == f"{method.name}Response"
        for name, enum in file.enum_types_by_name.items():
            prefix = "".join(f"_{letter}" if letter.isupper() else letter.upper() for letter in name).lstrip("_") + "_"
            assert all(value.name.startswith(prefix) for value in enum.values)
            assert enum.values_by_number[0].name == prefix + "UNSPECIFIED"
