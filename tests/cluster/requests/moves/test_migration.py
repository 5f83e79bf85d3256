"""Whether a preempted request goes on elsewhere, and where."""

from __future__ import annotations

from dataclasses import replace

import pytest

from actors.core.outputs.scheduler_stats import LoadReport, SchedulerStats
from actors.core.outputs.sent_work import SentWork
from cluster.requests.moves.migration import MigrationPlanner, PreemptedRequest, Target, choose_target
from cluster.routing.decision import RoutingMode
from cluster.routing.engine_connection import EngineConnection, EngineDescriptor, EngineKey, EngineRole
from cluster.routing.load_book import LoadBook
from tests.cluster.routing.cost_setup import engine
from tests.fakes import FakeEngine

REQUEST = PreemptedRequest(num_tokens=160, num_wait_steps=50)
ROOMY = Target(("d1", 7), block_size=16, num_blocks=100, num_free_blocks=60, num_waiting_reqs=0)


@pytest.mark.parametrize(
    ("request_", "target", "moves"),
    [
        pytest.param(REQUEST, ROOMY, True, id="room, and a wait"),
        pytest.param(replace(REQUEST, num_wait_steps=4), ROOMY, False, id="room comes as soon here"),
        pytest.param(replace(REQUEST, num_wait_steps=5), ROOMY, True, id="a step sooner there"),
        pytest.param(replace(REQUEST, num_tokens=256 * 2, num_wait_steps=6), ROOMY, False, id="much to bring"),
        pytest.param(replace(REQUEST, num_tokens=256 * 2, num_wait_steps=7), ROOMY, True, id="much to bring, a wait"),
        pytest.param(replace(REQUEST, num_migrations=2), ROOMY, True, id="its third migration"),
        pytest.param(replace(REQUEST, num_migrations=3), ROOMY, False, id="it has migrated enough"),
        # 160 tokens and the next one are 11 blocks; 10 have to be free beside them.
        pytest.param(REQUEST, replace(ROOMY, num_free_blocks=21), True, id="just enough room"),
        pytest.param(REQUEST, replace(ROOMY, num_free_blocks=20), False, id="its own requests would lack blocks soon"),
        pytest.param(REQUEST, replace(ROOMY, num_free_blocks=5), False, id="no room at all"),
        pytest.param(REQUEST, replace(ROOMY, num_promised_blocks=39), True, id="just enough that is not promised"),
        pytest.param(REQUEST, replace(ROOMY, num_promised_blocks=40), False, id="promised to others"),
        pytest.param(REQUEST, replace(ROOMY, num_waiting_reqs=3), True, id="some have just come, and there is room"),
        pytest.param(REQUEST, replace(ROOMY, num_waiting_reqs=4), False, id="some have just come, and take the room"),
        pytest.param(
            REQUEST, replace(ROOMY, num_blocks=200, num_free_blocks=200, num_waiting_reqs=4), True, id="room for all"
        ),
        pytest.param(
            REQUEST, replace(ROOMY, num_blocks=200, num_free_blocks=200, num_waiting_reqs=5), False, id="others wait"
        ),
        pytest.param(REQUEST, replace(ROOMY, stats_age_s=2.0), True, id="heard of it lately"),
        pytest.param(REQUEST, replace(ROOMY, stats_age_s=2.1), False, id="not heard of it lately"),
        pytest.param(REQUEST, replace(ROOMY, block_size=160), True, id="large blocks: two of them"),
        pytest.param(REQUEST, replace(ROOMY, num_state_blocks=39), True, id="just enough room for its state"),
        pytest.param(REQUEST, replace(ROOMY, num_state_blocks=40), False, id="no room for its state"),
    ],
)
def test_a_request_moves_where_that_is_quicker(request_: PreemptedRequest, target: Target, moves: bool) -> None:
    assert choose_target(request_, [target]) == (target if moves else None)


def test_the_engine_with_the_most_room_is_chosen() -> None:
    larger = replace(ROOMY, key=("d2", 1), num_blocks=1000, num_free_blocks=500)
    emptier = replace(ROOMY, key=("d3", 1), num_free_blocks=70)
    assert choose_target(REQUEST, [ROOMY, larger, emptier]) == emptier
    assert choose_target(REQUEST, [ROOMY, replace(ROOMY, key=("d0", 9))]) == replace(ROOMY, key=("d0", 9))
    assert choose_target(REQUEST, []) is None


NOW_S = 1000.0
HERE = FakeEngine("d0", EngineRole.DECODE)
THERE = FakeEngine("d1", EngineRole.DECODE)
PREFILL = FakeEngine("p0", EngineRole.PREFILL)
FREE = SchedulerStats(num_blocks=100, block_size=16, num_free_blocks=40)


class Heard:
    """The statistics that engines have sent, and a clock."""

    def __init__(self, mode: RoutingMode = RoutingMode.COST, **stats: SchedulerStats) -> None:
        self.stats = {(name, 7): (stat, NOW_S) for name, stat in stats.items()}
        self.now_s = NOW_S
        self.planner = MigrationPlanner(lambda: self.stats, lambda: self.now_s, mode=mode)

    def say(self, name: str, stats: SchedulerStats) -> None:
        self.stats[name, 7] = (stats, self.now_s)

    def target(self, *engines: EngineConnection) -> EngineKey | None:
        target = self.planner.find_target(REQUEST, HERE.descriptor, engines or (PREFILL, HERE, THERE))
        return None if target is None else target.descriptor.key


def test_a_request_moves_to_another_engine_that_decodes() -> None:
    heard = Heard(p0=replace(FREE, num_free_blocks=100), d0=FREE, d1=FREE)
    assert heard.target() == THERE.descriptor.key


@pytest.mark.parametrize(
    ("mode", "target"),
    [
        pytest.param(RoutingMode.COST, "p0", id="it goes on where prompts are preferred"),
        pytest.param(RoutingMode.AGGREGATE, "p0", id="roles mean nothing"),
        pytest.param(RoutingMode.DISAGGREGATE, None, id="a prefill engine never decodes beside decode engines"),
    ],
)
def test_where_no_decode_engine_has_room_the_mode_decides_about_prefill_engines(
    mode: RoutingMode, target: str | None
) -> None:
    heard = Heard(mode, p0=FREE, d0=FREE, d1=replace(FREE, num_free_blocks=5))
    found = heard.target()
    assert (None if found is None else found[0]) == target


def test_an_engine_reports_what_a_state_takes_there() -> None:
    fits, full = (replace(FREE, load_report=LoadReport(num_state_blocks=number)) for number in (10, 30))
    assert Heard(d0=FREE, d1=fits).target() == THERE.descriptor.key
    assert Heard(d0=FREE, d1=full).target() is None


def test_a_request_that_a_prefill_engine_decodes_moves_to_decode_engines_first() -> None:
    heard = Heard(p1=replace(FREE, num_free_blocks=100), d1=FREE)
    other = FakeEngine("p1", EngineRole.PREFILL)
    planner, engines = heard.planner, [PREFILL, other, THERE]
    assert planner.find_target(REQUEST, PREFILL.descriptor, engines) is THERE
    heard.say("d1", replace(FREE, num_free_blocks=5))
    assert planner.find_target(REQUEST, PREFILL.descriptor, engines) is other


def test_no_request_moves_to_an_encode_engine() -> None:
    assert Heard(e0=FREE).target(HERE, FakeEngine("e0", EngineRole.ENCODE)) is None


@pytest.mark.parametrize("role", [EngineRole.PREFILL, EngineRole.DECODE])
@pytest.mark.parametrize("mode", list(RoutingMode))
def test_in_a_cluster_of_one_role_requests_move_as_well(role: EngineRole, mode: RoutingMode) -> None:
    here, there = FakeEngine("d0", role), FakeEngine("x1", role)
    assert Heard(mode, x1=FREE).target(here, there) == there.descriptor.key


def test_where_engines_do_both_it_moves_to_one_of_them() -> None:
    here, there = FakeEngine("d0", EngineRole.BOTH), FakeEngine("b1", EngineRole.BOTH)
    assert Heard(b1=FREE).target(here, there) == ("b1", 7)


def test_without_other_engines_it_stays() -> None:
    heard = Heard(d1=FREE)
    assert heard.planner.find_target(REQUEST, HERE.descriptor, []) is None
    assert heard.target(HERE) is None


def test_it_stays_if_nothing_has_been_heard_of_the_others() -> None:
    assert Heard(d0=FREE).target() is None
    assert Heard(d1=SchedulerStats()).target() is None


class OtherVersion(FakeEngine):
    @property
    def descriptor(self) -> EngineDescriptor:
        return replace(super().descriptor, model_version=2)


def test_it_never_moves_to_an_engine_that_its_kv_could_not_be_used_by() -> None:
    other = OtherVersion("d1", EngineRole.DECODE)
    assert Heard(d1=FREE).target(PREFILL, HERE, other) is None


def test_what_was_sent_to_an_engine_since_it_last_spoke_counts_as_taken() -> None:
    heard = Heard(d1=FREE)
    # 11 blocks each, and 10 stay free: two of them fit.
    assert [heard.target() for _ in range(3)] == [THERE.descriptor.key, THERE.descriptor.key, None]
    heard.now_s += 0.5
    heard.say("d1", FREE)
    assert heard.target() is None, "it may not have known of them when it counted"
    heard.now_s += 1.1
    heard.say("d1", FREE)
    assert heard.target() == THERE.descriptor.key


def test_what_the_router_has_sent_to_an_engine_since_it_last_spoke_counts_as_taken() -> None:
    book = LoadBook()
    heard = Heard(d1=FREE)
    heard.planner = MigrationPlanner(lambda: heard.stats, lambda: NOW_S, load_book=book)
    session = engine("decode-1")
    session.descriptor = THERE.descriptor
    book.note_report(session)
    # 40 blocks are free there, the migrated request takes 11, and 10 have to stay free.
    for number, fits in ((19, True), (20, False)):
        session.num_submitted_requests += 1
        book.note_sent(THERE.descriptor, "r", SentWork(num_context_tokens=16 * number - 1))
        assert (heard.planner.find_target(REQUEST, HERE.descriptor, [HERE, THERE]) is not None) is fits
        heard.planner = MigrationPlanner(lambda: heard.stats, lambda: NOW_S, load_book=book)
