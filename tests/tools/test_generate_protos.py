import pickle
from pathlib import Path

from actors.core.requests.request import RequestStatus
from cluster.api.protos.raypd.v1 import generate_pb2
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
