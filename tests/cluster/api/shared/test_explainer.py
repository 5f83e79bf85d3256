"""A request is explained to its tenant and to operators, whichever ingress served it, and within a few seconds."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from cluster.access.allowance import Allowance, AllowanceLimits
from cluster.access.caller import ANYBODY, Caller
from cluster.api.shared import explainer
from cluster.api.shared.explainer import Explainer, Explanation, why_off_for_clients
from cluster.errors import (
    AllowanceSpent,
    ControllerUnavailable,
    InvalidRequest,
    PermissionDenied,
    RecordNotFound,
    RecordsAreOff,
)
from cluster.observability.record_store import RecordStore
from cluster.observability.request_records import FoundRecords, RecordQuery, RequestRecords, UnansweredIngress
from cluster.requests.serving import Serving
from cluster.routing.request_record import RequestRecord
from cluster.settings.ingress import IngressConfig
from tests.cluster.routing.record_samples import attempt, record
from tests.cluster.serving_setup import FakeAdmin, make_serving

ALICE = Caller(name="alice", tenant="a")
BOB = Caller(name="bob", tenant="b")
OPS = Caller(name="ops", tenant="ops", may_administer=True)


class SilentAdmin(FakeAdmin):
    """A controller that never answers. most: how many calls there were at a time"""

    num_under_way = most = 0

    async def find_records(self, query: RecordQuery) -> FoundRecords:
        self.num_under_way += 1
        self.most = max(self.most, self.num_under_way)
        try:
            await asyncio.Event().wait()
        finally:
            self.num_under_way -= 1
        raise AssertionError("nothing sets the event")


class DeadAdmin(FakeAdmin):
    async def find_records(self, query: RecordQuery) -> FoundRecords:
        raise ControllerUnavailable("its node is gone")


def make(*here: RequestRecord, admin: FakeAdmin | None = None) -> Explainer:
    """An explainer at an ingress with these records."""
    return Explainer(serving_with(*here), admin or FakeAdmin(), IngressConfig())


def serving_with(*here: RequestRecord, max_records: int = 1000) -> Serving:
    serving, store = make_serving(), RecordStore(max_records, 1 << 24)
    for one in here:
        store.put(one)
    serving.records = RequestRecords("ingress-0", store)
    return serving


def seen(found: Explanation) -> list[tuple[str, str]]:
    return [(one.tenant, one.request_id) for one in found.records]


async def test_a_tenant_sees_its_own_request() -> None:
    found = await make(record(tenant="a"), record(tenant="b")).explain("r", None, ALICE)
    assert seen(found) == [("a", "r")]
    assert seen(await make(record(tenant="a")).explain("r", "a", ALICE)) == [("a", "r")]


@pytest.mark.parametrize("tenant", [None, "a"])
async def test_another_tenants_request_is_as_unknown_as_one_that_never_was(tenant: str | None) -> None:
    there = FakeAdmin(FoundRecords())
    with pytest.raises(RecordNotFound) as others:
        await make(record(tenant="a"), admin=there).explain("r", tenant, BOB)
    with pytest.raises(RecordNotFound) as unknown:
        await make(admin=there).explain("r", tenant, BOB)
    assert str(others.value) == str(unknown.value)


async def test_other_ingresses_are_asked_only_for_what_the_caller_may_see() -> None:
    admin = FakeAdmin()
    one = make(record(tenant="a"), admin=admin)
    await one.explain("r", None, ALICE)
    await one.explain("r", None, OPS)
    await one.explain("r", "a", OPS)
    assert admin.asked == [("find_records", RecordQuery("r", tenant)) for tenant in ("a", None, "a")]


async def test_an_operator_sees_the_requests_of_all_tenants_or_of_one() -> None:
    one = make(record(tenant="a"), record(tenant="b"))
    assert seen(await one.explain("r", None, OPS)) == [("a", "r"), ("b", "r")]
    assert seen(await one.explain("r", "b", OPS)) == [("b", "r")]
    assert seen(await one.explain("r", None, ANYBODY)) == [("a", "r"), ("b", "r")]


async def test_the_beginning_of_an_id_is_enough_where_no_other_request_begins_so() -> None:
    samples = [record(request_id=f"cmpl-5.0.{n}") for n in range(2)]
    one = make(record(request_id="chat-3f"), record(request_id="chat-4a"), *samples)
    assert seen(await one.explain("chat-3", None, ANYBODY)) == [("", "chat-3f")]
    assert seen(await one.explain("cm", None, ANYBODY)) == [("", "cmpl-5.0.0"), ("", "cmpl-5.0.1")]
    with pytest.raises(InvalidRequest, match=r"request_id is 'chat'; allowed: .* 2 requests begin with this"):
        await one.explain("chat", None, ANYBODY)
    many = make(*(record(request_id=f"r{n}") for n in range(100)))
    with pytest.raises(InvalidRequest, match="at least 32 requests begin with this"):
        await many.explain("r", None, ANYBODY)


async def test_a_whole_id_is_no_beginning_of_others_wherever_these_are() -> None:
    there = FakeAdmin(FoundRecords((record(request_id="r1").to_bytes(), record(request_id="r2").to_bytes())))
    assert seen(await make(record(), record(request_id="r3"), admin=there).explain("r", None, ANYBODY)) == [("", "r")]
    elsewhere = FakeAdmin(FoundRecords((record().to_bytes(),)))
    assert seen(await make(record(request_id="r3"), admin=elsewhere).explain("r", None, ANYBODY)) == [("", "r")]
    with pytest.raises(InvalidRequest, match=" 3 requests begin with this"):
        await make(record(request_id="r3"), admin=there).explain("r", None, ANYBODY)


async def test_requests_of_other_tenants_neither_match_a_beginning_nor_make_it_ambiguous() -> None:
    one = make(record(request_id="r1", tenant="a"), record(request_id="r2", tenant="b"))
    assert seen(await one.explain("r", None, ALICE)) == [("a", "r1")]
    assert seen(await one.explain("r", "b", OPS)) == [("b", "r2")]
    with pytest.raises(InvalidRequest, match=" 2 requests begin with this"):
        await one.explain("r", None, OPS)
    with pytest.raises(RecordNotFound):
        await one.explain("r1", None, BOB)


async def test_an_id_may_have_its_tenant_before_it_as_top_prints_ids() -> None:
    one = make(record(request_id="r1", tenant="a"), record(request_id="r2", tenant="b"))
    assert seen(await one.explain("b/r2", None, OPS)) == [("b", "r2")]
    assert seen(await one.explain("b/r", None, OPS)) == [("b", "r2")]
    assert seen(await one.explain("a/r1", None, ALICE)) == seen(await one.explain("a/r1", "a", OPS)) == [("a", "r1")]
    there = FakeAdmin(FoundRecords((record(request_id="r2", tenant="b").to_bytes(),)))
    assert seen(await make(admin=there).explain("b/r2", None, OPS)) == [("b", "r2")]
    for request_id, tenant, caller in (
        ("b/r2", None, ALICE),
        ("b/r2", "a", OPS),
        ("b/", None, OPS),
        ("/r2", None, OPS),
    ):
        with pytest.raises(RecordNotFound):
            await one.explain(request_id, tenant, caller)


async def test_a_slash_of_an_id_itself_comes_before_that_of_a_tenant() -> None:
    one = make(record(request_id="b/r", tenant="a"), record(request_id="r", tenant="b"))
    assert seen(await one.explain("b/r", None, OPS)) == [("a", "b/r")]
    assert seen(await one.explain("b/r", None, BOB)) == [("b", "r")]


async def test_records_of_all_ingresses_come_in_the_order_of_their_arrival() -> None:
    later = msgspec.structs.replace(record(), arrived_at_s=2000.0, ingress="ingress-0")
    earlier = msgspec.structs.replace(record(), arrived_at_s=1000.0, ingress="ingress-1")
    admin = FakeAdmin(FoundRecords((earlier.to_bytes(),), (UnansweredIngress("ingress-2", "it is dead"),)))
    found = await make(later, admin=admin).explain("r", None, ANYBODY)
    assert [one.ingress for one in found.records] == ["ingress-1", "ingress-0"]
    assert found.unanswered == (UnansweredIngress("ingress-2", "it is dead"),)


async def test_an_unknown_id_is_answered_with_what_is_kept_and_who_did_not_answer() -> None:
    admin = FakeAdmin(FoundRecords((), (UnansweredIngress("ingress-1", "it is waiting: killed"),)))
    with pytest.raises(RecordNotFound) as error:
        await make(admin=admin).explain("r", None, ALICE)
    assert str(error.value) == (
        "no record of request 'r': check the id, and ask soon after the request. Each ingress keeps those of its "
        "last 1000 requests (ingress.max_request_records), in 16 MiB at most (ingress.request_records_mib); a request "
        "that no engine got leaves none, and an ingress that was restarted has none from before. The record may be at "
        "an ingress that did not answer: ingress-1 (it is waiting: killed)"
    )


async def test_without_the_controller_this_ingress_answers_alone_and_says_so() -> None:
    found = await make(record(), admin=DeadAdmin()).explain("r", None, ANYBODY)
    assert seen(found) == [("", "r")]
    [unanswered] = found.unanswered
    assert (unanswered.ingress, "its node is gone" in unanswered.reason) == ("all other ingresses", True)


async def test_a_controller_that_hangs_has_a_deadline_and_few_callers_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(explainer, "_TIMEOUT_S", 0.05)
    admin = SilentAdmin()
    one = make(record(), admin=admin)
    async with asyncio.timeout(60):
        found = await asyncio.gather(*(one.explain("r", None, ANYBODY) for _ in range(20)))
    assert {answer.unanswered for answer in found} == {
        (UnansweredIngress("all other ingresses", "no answer within 0.05 s"),)
    }
    assert (admin.most, admin.num_under_way) == (4, 0)


@pytest.mark.parametrize("request_id", ["", "x" * 129, "a\nb", "a\x00", "\x1b[31m", "é", "\u202e"])
async def test_a_hostile_id_is_refused_with_what_is_allowed_and_asks_nobody(request_id: str) -> None:
    admin = FakeAdmin()
    with pytest.raises(
        InvalidRequest, match=r"request_id is .*; allowed: 1 to 128 printable ASCII characters"
    ) as error:
        await make(admin=admin).explain(request_id, None, ANYBODY)
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 200
    assert admin.asked == []


async def test_a_long_tenant_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"tenant is .*; allowed: at most 64 characters"):
        await make().explain("r", "x" * 65, OPS)


async def test_without_records_the_answer_says_which_setting_keeps_them() -> None:
    one = Explainer(serving_with(max_records=0), FakeAdmin(), IngressConfig(max_request_records=0))
    with pytest.raises(RecordsAreOff, match=r"ingress\.max_request_records is 0; set it to the number"):
        await one.explain("r", None, ANYBODY)


async def test_a_call_counts_against_its_tokens_requests() -> None:
    allowance = Allowance("alice", AllowanceLimits(requests_per_s=1.0, burst_s=1.0), clock=lambda: 0.0)
    caller = Caller(name="alice", tenant="a", allowance=allowance)
    one = make(record(tenant="a"))
    await one.explain("r", None, caller)
    with pytest.raises(AllowanceSpent):
        await one.explain("r", None, caller)


@pytest.mark.parametrize("num_attempts", [1, 16])
async def test_an_answer_is_bounded_whatever_the_ingresses_have(num_attempts: int) -> None:
    one = record(*[attempt()] * num_attempts)
    many = FoundRecords((one.to_bytes(),) * 100)
    found = await make(admin=FakeAdmin(many)).explain("r", None, ANYBODY)
    most = min(64, (1 << 20) // len(one.to_bytes()))
    assert (len(found.records), found.num_left_out) == (most, 100 - most)


def last(*ids: str, tenant: str = "a", arrived_at_s: float = 1000.0) -> tuple[RequestRecord, ...]:
    return tuple(
        msgspec.structs.replace(record(request_id=name, tenant=tenant), arrived_at_s=arrived_at_s + number)
        for number, name in enumerate(ids)
    )


async def test_the_last_requests_of_all_ingresses_come_in_the_order_of_their_arrival() -> None:
    elsewhere = last("between", "newest", arrived_at_s=1000.5)
    admin = FakeAdmin(FoundRecords(tuple(one.to_bytes() for one in elsewhere[::-1])))
    one = make(*last("oldest", "second"), admin=admin)
    assert [name for _, name in seen(await one.explain_last(10, None, OPS))] == [
        "oldest",
        "between",
        "second",
        "newest",
    ]
    assert [name for _, name in seen(await one.explain_last(2, None, OPS))] == ["second", "newest"]
    assert admin.asked[-1] == ("find_records", RecordQuery("", None, 2))


@pytest.mark.parametrize(
    ("caller", "tenant", "expected", "asked"),
    [
        pytest.param(ALICE, None, ["a"], ["a"], id="a tenant sees its own"),
        pytest.param(ALICE, "a", ["a"], ["a"], id="a tenant may name itself"),
        pytest.param(ALICE, "b", [], [], id="and sees nothing of others"),
        pytest.param(OPS, None, ["a", "b"], [None], id="an operator sees all"),
        pytest.param(OPS, "b", ["b"], ["b"], id="an operator may name one"),
    ],
)
async def test_of_the_last_requests_a_tenant_sees_its_own(
    caller: Caller, tenant: str | None, expected: list[str], asked: list[str | None]
) -> None:
    admin = FakeAdmin()
    one = make(*last("r"), *last("r", tenant="b", arrived_at_s=2000.0), admin=admin)
    found = await one.explain_last(100, tenant, caller)
    assert [each for each, _ in seen(found)] == expected
    assert admin.asked == [("find_records", RecordQuery("", one_tenant, 100)) for one_tenant in asked]


async def test_where_there_is_no_request_the_last_ones_are_none() -> None:
    assert await make().explain_last(5, None, ANYBODY) == Explanation(())


@pytest.mark.parametrize("number", [0, -1, 501, 2**32 - 1])
async def test_a_number_of_last_requests_out_of_range_is_refused(number: int) -> None:
    with pytest.raises(InvalidRequest, match=r"last is .*; allowed: 1 to 500"):
        await make().explain_last(number, None, ANYBODY)


async def test_the_last_requests_are_bounded_in_bytes_and_the_newest_are_kept() -> None:
    large = msgspec.structs.replace(record(), attempts=tuple([attempt()] * 16))
    many = [msgspec.structs.replace(large, request_id=f"r-{n}", arrived_at_s=float(n)) for n in range(400)]
    found = await make(admin=FakeAdmin(FoundRecords(tuple(one.to_bytes() for one in many)))).explain_last(
        400, None, OPS
    )
    assert sum(len(one.to_bytes()) for one in found.records) <= 2 << 20
    assert len(found.records) + found.num_left_out == 400
    assert found.num_left_out > 0
    assert found.records[-1].request_id == "r-399"


async def test_other_tasks_run_while_the_records_of_many_ingresses_are_decoded() -> None:
    num_turns = 0

    async def take_turns() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    def find(num_records: int) -> Explainer:
        return make(admin=FakeAdmin(FoundRecords((record().to_bytes(),) * num_records)))

    task = asyncio.create_task(take_turns())
    took = []
    for num_records in (500, 5000):
        before = num_turns
        await find(num_records).explain_last(10, None, OPS)
        took.append(num_turns - before)
    task.cancel()
    assert took[1] - took[0] == 9, "500 records at a time"


async def test_the_last_requests_count_against_the_tokens_limit_and_need_records() -> None:
    allowance = Allowance("alice", AllowanceLimits(requests_per_s=1.0, burst_s=1.0), clock=lambda: 0.0)
    caller = Caller(name="alice", tenant="a", allowance=allowance)
    await make().explain_last(1, None, caller)
    with pytest.raises(AllowanceSpent):
        await make().explain_last(1, None, caller)
    off = Explainer(serving_with(max_records=0), FakeAdmin(), IngressConfig(max_request_records=0))
    with pytest.raises(RecordsAreOff):
        await off.explain_last(1, None, OPS)


@pytest.mark.parametrize(
    ("settings", "asks_for_tokens", "reason"),
    [
        ({}, False, ""),
        ({"host": "0.0.0.0", "insecure": True}, True, ""),
        ({"admin_port": 50100}, True, ""),
        ({"admin_port": 50100}, False, "explained at the port ingress.admin_port"),
        (
            {"host": "0.0.0.0", "insecure": True},
            False,
            "beyond loopback (ingress.host: 0.0.0.0) and asks for no tokens",
        ),
    ],
)
async def test_without_tokens_requests_are_explained_only_where_nobody_else_could_ask(
    settings: dict[str, object], asks_for_tokens: bool, reason: str
) -> None:
    config = IngressConfig.model_validate(settings)
    found = why_off_for_clients(config, asks_for_tokens=asks_for_tokens)
    assert found == reason or (reason and reason in found)
    asked = Explainer(serving_with(record()), FakeAdmin(), config, found)
    for asking in (asked.explain("r", None, ANYBODY), asked.explain_last(1, None, ANYBODY)):
        if reason:
            with pytest.raises(PermissionDenied):
                await asking
        else:
            assert len((await asking).records) == 1
