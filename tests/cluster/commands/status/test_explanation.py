"""`raypd explain` through the real API of two ingresses: what it prints, for whom, and what it says where it cannot.

Tests of cluster/commands/operate.py, cluster/api/grpc/generate_service.py.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import StringIO
from pathlib import Path

import msgspec
import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from cluster.access.access_control import AccessControl
from cluster.access.tokens import Tokens, hash_token, make_token
from cluster.api.protos.raypd.v1 import generate_pb2
from cluster.cli import app
from cluster.client import BlockingClient, CallFailed, GenerateClient
from cluster.commands.status.explanation import Asked, render_explanation, show_explanation
from cluster.observability.record_store import RecordStore
from cluster.observability.request_records import FoundRecords, RecordQuery, RequestRecords, UnansweredIngress
from cluster.requests.serving import Serving
from cluster.routing.decision import RoleChoice, RoleUse
from cluster.routing.request_record import RequestRecord
from tests.cluster.routing.record_samples import ALONE, attempt, decision, record
from tests.cluster.serving_setup import FakeAdmin, grpc_settings, make_ingress_server, make_serving

ALICE, BOB, OPS = make_token(), make_token(), make_token()
SERVED = msgspec.structs.replace(record(tenant="alice"), ingress="ingress-1")


class Ingresses(FakeAdmin):
    """A controller that asks all ingresses but the asker. dead: ingresses that do not answer"""

    def __init__(self, *all_of_them: Serving) -> None:
        super().__init__()
        self._all = all_of_them
        self.asker: Serving | None = None
        self.dead: tuple[UnansweredIngress, ...] = ()

    async def find_records(self, query: RecordQuery) -> FoundRecords:
        others = [one for one in self._all if one is not self.asker]
        return FoundRecords(tuple(data for one in others for data in one.find_records(query)), self.dead)


def serving(name: str, *records: RequestRecord) -> Serving:
    one, store = make_serving(), RecordStore(100, 1 << 20)
    for each in records:
        store.put(each)
    one.records = RequestRecords(name, store)
    return one


@asynccontextmanager
async def started(admin: Ingresses, one: Serving, access: AccessControl | None = None) -> AsyncIterator[str]:
    admin.asker = one
    server = make_ingress_server(one, admin=admin, settings=grpc_settings(access))
    port = await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.drain(grace_s=0)


@pytest.fixture
def access(tmp_path: Path) -> AccessControl:
    path = tmp_path / "tokens"
    entries = [
        {"name": name, "sha256": hash_token(token), "admin": name == "ops"}
        for name, token in (("alice", ALICE), ("bob", BOB), ("ops", OPS))
    ]
    path.write_text(yaml.safe_dump({"tokens": entries}))
    return AccessControl(Tokens(path))


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Ingresses:
    """Two ingresses; alice's request "r" was served by the other one."""
    monkeypatch.setenv("COLUMNS", "100")
    return Ingresses(serving("ingress-0"), serving("ingress-1", SERVED))


async def explained(address: str, *options: str, token: str = "") -> tuple[int, str]:
    """The exit status of the command, and what it printed."""
    environment = {"RAYPD_TOKEN": token} if token else {}

    def explain() -> tuple[int, str]:
        result = CliRunner().invoke(app, ["explain", *options, "--address", address], env=environment)
        return result.exit_code, result.output

    return await asyncio.to_thread(explain)


async def test_a_request_is_explained_by_the_ingress_that_did_not_serve_it(two: Ingresses) -> None:
    async with started(two, two._all[0]) as address:
        exit_code, text = await explained(address, "r")
    assert exit_code == 0
    for line in (
        "request r of tenant alice",
        "at ingress-1 since 1970-01-01 00:16:40 UTC, model version 1",
        "100 prompt tokens, 3 output tokens, ended after 1.50 s: length",
        "first token after 1.00 s; between tokens 30.0 ms (median), 100.0 ms (longest)",
        "what took so long: no long wait: prefill-0 computed the prompt of 100 tokens for 800.0 ms of 1.50 s",
        "attempt 1, 0.0 ms after the arrival: prefill-0 -> decode-0",
        "mode cost: it costs least; the runner-up, decode_alone on decode-1, costs 500.0 ms more",
        "chosen: 0.80 times the cost of the best placement without roles, 2.50 s",
    ):
        assert line in text.splitlines()
    rows = [line.split() for line in text.splitlines()]
    assert ["way", "prefill_decode", "decode_alone"] in rows
    assert ["inflicted", "on", "others", "0.0", "ms", "2.00", "s"] in rows
    assert ["total", "2.00", "s", "2.50", "s"] in rows
    assert ["queue", "200.0", "ms", "300.0", "ms", "+50%"] in rows
    assert ["prefill", "400.0", "ms", "800.0", "ms", "+100%"] in rows
    assert ["time", "to", "first", "token", "500.0", "ms", "1.00", "s", "+100%"] in rows


async def test_json_has_the_record_as_it_is(two: Ingresses) -> None:
    two.dead = (UnansweredIngress("ingress-2", "it is dead"),)
    async with started(two, two._all[0]) as address:
        exit_code, text = await explained(address, "r", "--json")
    answer = json.loads(text)
    assert exit_code == 0
    assert RequestRecord.from_json(json.dumps(answer["records"][0])) == SERVED
    assert answer["unanswered"] == [{"ingress": "ingress-2", "reason": "it is dead"}]
    assert answer["left_out"] == 0
    assert [(one["request_id"], one["spans"][0]["phase"]) for one in answer["stories"]] == [("r", "queue")]


async def test_a_dead_ingress_is_named_beside_the_records_of_the_others(two: Ingresses) -> None:
    two.dead = (UnansweredIngress("ingress-2", "it is [red]dead"),)
    async with started(two, two._all[0]) as address:
        _, text = await explained(address, "r")
    assert "ingress-2 did not answer, and may have further records: it is [red]dead" in text


async def test_tokens_see_their_own_tenants_requests_and_operators_all(two: Ingresses, access: AccessControl) -> None:
    async with started(two, two._all[0], access) as address:
        own = await explained(address, "r", token=ALICE)
        operators = await explained(address, "r", token=OPS)
        of_tenant = await explained(address, "r", "--tenant", "alice", token=OPS)
        others = await explained(address, "r", token=BOB)
        unknown = await explained(address, "never-was", token=BOB)
        without = await explained(address, "r")
    assert own == operators == of_tenant
    assert own[0] == 0
    assert others[0] == unknown[0] == without[0] == 1
    assert others[1] == unknown[1].replace("never-was", "r")
    assert "NOT_FOUND: no record of request 'r'" in " ".join(others[1].split())
    assert "UNAUTHENTICATED" in without[1]


async def test_an_id_that_top_has_cut_is_enough_if_only_one_request_begins_so() -> None:
    ids = ("chatcmpl-3f2a5b6c7d8e9f0a1b2c", "chatcmpl-4a", "chatcmpl-4b")
    alone = serving("ingress-0", *(record(request_id=one) for one in ids))
    two = Ingresses(alone)
    async with started(two, alone) as address:
        exit_code, text = await explained(address, "chatcmpl-3f2a5b6c7d8e9f…")
        ambiguous, why = await explained(address, "chatcmpl-4")
    assert (exit_code, ambiguous) == (0, 1)
    assert f"request {ids[0]}" in text.splitlines()
    assert "INVALID_ARGUMENT: request_id is 'chatcmpl-4'; allowed: a whole id, or as much" in " ".join(why.split())
    assert "2 requests begin with this" in " ".join(why.split())


@pytest.mark.parametrize("request_id", ["x" * 5000, "\x1b]0;owned\x07", "a\nb"])
async def test_a_hostile_id_is_refused_in_few_printable_words(two: Ingresses, request_id: str) -> None:
    async with started(two, two._all[0]) as address:
        exit_code, text = await explained(address, request_id)
    assert exit_code == 1
    assert "INVALID_ARGUMENT: request_id is" in text
    assert "1 to 128 printable ASCII characters" in " ".join(text.split())
    assert text.replace("\n", "").isprintable()


async def test_the_python_clients_explain_too(two: Ingresses) -> None:
    async with started(two, two._all[0]) as address:
        async with GenerateClient(address) as client:
            found = await client.explain("r", tenant="alice", timeout_s=10)
            with pytest.raises(CallFailed, match="NOT_FOUND"):
                await client.explain("r", tenant="bob", timeout_s=10)

        def ask() -> generate_pb2.ExplainResponse:
            with BlockingClient(address) as blocking:
                return blocking.explain("r", timeout_s=10)

        assert await asyncio.to_thread(ask) == found
    assert [RequestRecord.from_json(one).ingress for one in found.records] == ["ingress-1"]


def printed(*records: RequestRecord | str, left_out: int = 0, width: int = 80) -> str:
    output = StringIO()
    texts = [one if isinstance(one, str) else one.to_json().decode() for one in records]
    found = generate_pb2.ExplainResponse(records=texts, left_out=left_out)
    Console(file=output, width=width).print(render_explanation(found))
    return output.getvalue()


def test_each_attempt_has_its_own_part_with_the_reason_why_the_one_before_ended() -> None:
    text = printed(record(attempt(failure="engine decode-0 is lost"), attempt(began_s=0.5, why=decision(ALONE))))
    first, second = text.index("attempt 1, 0.0 ms"), text.index("attempt 2, 500.0 ms")
    assert first < text.index("failed after 3 output tokens: engine decode-0 is lost") < second


def test_attempts_that_were_left_out_are_counted() -> None:
    text = printed(msgspec.structs.replace(record(attempt(), attempt()), num_attempts_left_out=7))
    assert "7 attempts are left out here" in text
    assert "attempt 9, " in text


def test_a_request_without_predictions_says_so() -> None:
    text = printed(record(attempt(why=decision(None))))
    assert "mode cost: it costs least; nothing was predicted" in text
    assert "what came true" not in text
    assert "what the engines reported" in text


def test_how_much_roles_count_is_said_with_the_load_that_decided_it() -> None:
    roles = RoleChoice(RoleUse.KEPT, 105.0, 102.8, 91.5)
    text = " ".join(printed(record(attempt(why=msgspec.structs.replace(decision(), roles=roles)))).split())
    assert (
        "roles are kept: 105.0 requests/s come; with roles kept 102.8 would meet their aims, and 91.5 without roles"
    ) in text
    unknown = msgspec.structs.replace(decision(), roles=RoleChoice())
    assert "roles are" not in printed(record(attempt(why=unknown)))


def test_texts_of_clients_and_engines_are_no_markup() -> None:
    text = printed(record(attempt(failure="[/red] broke"), request_id="[/bold]"))
    assert "request [/bold]" in text
    assert "[/red] broke" in text


def test_a_record_of_another_version_is_named_and_the_others_are_shown() -> None:
    later = record().to_json().decode().replace('"schema":1', '"schema":9')
    text = " ".join(printed(later, record(), left_out=3).split())
    assert "schema 9, and this raypd reads 1" in text
    assert "--json prints it as it is" in text
    assert "request r" in text
    assert "3 further records do not fit into an answer: ask for a sample by its own id" in text


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_line_is_wider_than_the_screen(width: int) -> None:
    assert max(map(len, printed(record(), width=width).splitlines())) <= width


async def test_a_cluster_that_does_not_answer_is_an_error_within_the_timeout() -> None:
    console = Console(file=StringIO())
    with pytest.raises(CallFailed):
        await show_explanation("127.0.0.1:1", console, Asked("r"), timeout_s=0.2)


async def test_without_an_id_the_last_requests_have_a_line_each(two: Ingresses, access: AccessControl) -> None:
    async with started(two, two._all[0], access) as address:
        exit_code, text = await explained(address, token=ALICE)
        others = await explained(address, token=BOB)
    (row,) = [line for line in text.splitlines() if line.startswith("r ")]
    assert (exit_code, row.split()[2:8]) == (0, ["s", "1.50", "s", "1.00", "s", "3"])
    assert "length" in row
    assert others == (0, "no requests yet\n")


async def test_a_trace_for_perfetto_is_written_to_a_file(two: Ingresses, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    two.dead = (UnansweredIngress("ingress-2", "it is dead"),)
    async with started(two, two._all[0]) as address:
        exit_code, text = await explained(address, "--perfetto", str(path))
        refused, why = await explained(address, "--perfetto", str(tmp_path / "no" / "trace.json"))
    assert exit_code == 0
    assert "1 requests in" in text
    assert "ingress-2 did not answer" in text
    trace = json.loads(path.read_text())
    names = [one["args"]["name"] for one in trace["traceEvents"] if one["name"] == "process_name"]
    assert names == ["decode-0", "ingress-1", "prefill-0"]
    assert refused == 1
    assert "cannot be written: No such file or directory" in " ".join(why.split())


@pytest.mark.parametrize("last", ["0", "501", "many"])
async def test_a_number_of_requests_that_cannot_be_is_refused_before_anybody_is_asked(last: str) -> None:
    exit_code, text = await explained("127.0.0.1:1", "--last", last)
    assert exit_code == 2
    assert "--last" in text
