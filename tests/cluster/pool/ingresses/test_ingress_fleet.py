"""Ingresses die, hang and fall behind, and the others, and the controller, do not wait for them.

Tests of cluster/pool/ingresses/ingress_incarnation.py, cluster/pool/ingresses/ingress_starter.py,
cluster/pool/ingresses/ingress_table.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import pytest
import ray

from actors.model_facts import ModelFacts
from cluster.api.ingress_actor import IngressHealth
from cluster.api.shared.ports import IngressPorts
from cluster.config import ClusterConfig
from cluster.errors import AddressUnavailable, CannotStart, InvalidConfig
from cluster.observability.request_records import RecordQuery, UnansweredIngress
from cluster.observability.routing_figures import NOTHING_ROUTED, RoutingSummary, RoutingTotals
from cluster.pool.cluster_trust import ClusterTrust
from cluster.pool.ingresses import ingress_fleet
from cluster.pool.ingresses.ingress_fleet import IngressFleet
from cluster.pool.ingresses.ingress_starter import IngressStarter
from cluster.pool.journal import Journal
from cluster.pool.ray_objects.head_probe import HeadProbe
from cluster.pool.ray_objects.object_names import ingress_actor_name
from cluster.routing.engine_connection import EngineDescriptor, EngineRole
from cluster.sessions.cluster_membership import Membership
from cluster.settings.ingress import IngressConfig
from cluster.settings.restarts import RestartConfig
from kv_transfer.trust.membership import Trust, TrustMaterial
from tests.cluster.pool.fake_ray import CANNOT_START, UNAVAILABLE, FakeRay
from tests.kv_transfer.connected_workers import LAYOUT

FACTS = ModelFacts(64, 257, (256,), LAYOUT)
ENGINE = EngineDescriptor("decode-0", 1, EngineRole.DECODE, "127.0.0.1:1")
POLICY = RestartConfig(window_s=1e6, first_backoff_s=1000.0, max_backoff_s=1000.0)
QUERY = RecordQuery("r", "a")
TAKEN_PORT = 50099
NOW_S = time.time()
"""Deaths are noted by the wall clock."""


@pytest.fixture(autouse=True)
def _stopped_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long ago this file was imported."""
    monkeypatch.setattr(time, "time", lambda: NOW_S)


@dataclass
class FakeIngress:
    """The object behind an ingress's actor. ports: what it is told to use; proofs: decode engines it has proven."""

    config: ClusterConfig
    controller_name: str
    number: int
    incarnation: int
    trust: Trust = field(default_factory=Trust)
    ports: IngressPorts | None = None
    is_open: bool = False
    versions: list[int] = field(default_factory=list)
    proofs: list[str] = field(default_factory=list)
    cannot_open: bool = False
    busy_s: float = 0.0
    records: list[bytes] = field(default_factory=list)
    routing: RoutingSummary = NOTHING_ROUTED

    async def find_records(self, query: RecordQuery) -> list[bytes]:
        assert query == QUERY
        return self.records

    async def place(self) -> tuple[str, str]:
        return "node-a", "10.0.0.1"

    async def use_trust(self, material: TrustMaterial) -> int:
        self.trust.use(material)
        return self.trust.generation

    async def use_ports(self, ports: IngressPorts) -> None:
        assert self.trust.material is not None, "it was not given the cluster's secret first"
        if ports.grpc == TAKEN_PORT:
            raise InvalidConfig("node a", [f"port {ports.grpc} is taken"])
        self.ports = IngressPorts(ports.grpc or 4242, None if ports.http is None else ports.http or 4243)

    async def health(self) -> IngressHealth:
        assert self.ports is not None, "it was asked before it could answer"
        return IngressHealth(
            self.versions[-1] if self.versions else 0, 3, self.trust.generation, self.busy_s, self.routing
        )

    async def update_membership(self, membership: Membership) -> None:
        assert self.ports is not None
        self.versions.append(membership.version)

    async def prove(self, prefill: EngineDescriptor | None, decode: EngineDescriptor, facts: ModelFacts) -> None:
        assert self.ports is not None
        self.proofs.append(decode.engine_id)

    async def start(self, facts: ModelFacts) -> IngressPorts:
        if self.cannot_open:
            raise AddressUnavailable("127.0.0.1:1", "it is taken")
        self.is_open = True
        assert self.ports is not None
        return self.ports

    async def drain(self, grace_s: float) -> None:
        self.is_open = False


class World:
    """Ingresses, and what happens to them. saves: how many of them were known when they were saved."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int, port: int = 50051) -> None:
        config = ClusterConfig(
            ingress=IngressConfig(count=count, port=port), heartbeat_interval_s=1.0, heartbeat_timeout_s=2.0
        )
        self.ray = FakeRay(monkeypatch, FakeIngress)
        self.journal = Journal()
        self.started_when_saved: list[int] = []
        self.trust = ClusterTrust(None)
        self.trust.begin()
        self.ingresses = self.fleet(config)

    def fleet(self, config: ClusterConfig) -> IngressFleet:
        config = config.model_copy(update={"restarts": POLICY})
        head = HeadProbe()
        starter = IngressStarter(config, self.journal, head, self._save, self.trust)
        return IngressFleet(config, starter, self.journal, head, self.trust)

    async def _save(self) -> None:
        self.started_when_saved.append(len(self.ray.started))

    async def up(self) -> None:
        await self.ingresses.start_missing(NOW_S)
        await self.ingresses.open(FACTS)

    async def look(self, now_s: float = NOW_S, avoided: Collection[str] = ()) -> None:
        """A round, and what it has begun."""
        await self.ingresses.look(now_s, avoided)
        await self.ingresses.settled()

    def thing(self, name: str) -> FakeIngress:
        ingress = self.ray.by_name[name].thing
        assert isinstance(ingress, FakeIngress)
        return ingress

    def states(self) -> list[tuple[int, str]]:
        return [(view.incarnation, view.state) for view in self.ingresses.views()]


WorldOf = Callable[..., World]


@pytest.fixture
def world_of(monkeypatch: pytest.MonkeyPatch) -> WorldOf:
    return lambda count=1, port=50051: World(monkeypatch, count, port)


async def test_ingresses_of_one_node_take_ports_that_follow_each_other(world_of: WorldOf) -> None:
    world = world_of(3)
    await world.up()
    assert world.ingresses.addresses == ["127.0.0.1:50051", "127.0.0.1:50052", "127.0.0.1:50053"]
    assert world.ingresses.http_addresses == ["127.0.0.1:8000", "127.0.0.1:8001", "127.0.0.1:8002"]


async def test_one_that_dies_is_replaced_on_its_port_and_told_who_serves(world_of: WorldOf) -> None:
    world = world_of(2)
    await world.up()
    await world.ingresses.publish(Membership(5, ()))
    world.ray.by_name["raypd-ingress/1/1"].die()
    await world.look()
    assert world.states() == [(1, "ready"), (2, "ready")]
    assert world.thing("raypd-ingress/1/2").ports == IngressPorts(50052, 8001)
    assert world.thing("raypd-ingress/1/2").versions[-1] == 5


async def test_one_that_keeps_dying_is_tried_again_later(world_of: WorldOf) -> None:
    world = world_of()
    await world.up()
    for incarnation in (1, 2):
        world.ray.by_name[f"raypd-ingress/0/{incarnation}"].die()
        await world.look()
    assert world.states() == [(2, "waiting")]
    await world.look(NOW_S + 2 * POLICY.first_backoff_s)
    assert world.states() == [(3, "ready")]


async def test_one_that_cannot_listen_is_shown_with_the_reason(world_of: WorldOf) -> None:
    world = world_of()
    await world.ingresses.start_missing(NOW_S)
    await world.ingresses.settled()
    world.thing("raypd-ingress/0/1").cannot_open = True
    await world.ingresses.open(FACTS)
    [view] = world.ingresses.views()
    assert view.state == "waiting"
    assert "it is taken" in view.last_error
    assert world.ray.alive == []


@pytest.mark.parametrize("failure", CANNOT_START.values(), ids=CANNOT_START)
async def test_one_that_ray_cannot_start_is_shown_with_the_reason_and_tried_again(
    world_of: WorldOf, failure: Exception
) -> None:
    world = world_of()
    world.ray.failures = {"raypd-ingress/0/1": failure, "raypd-ingress/0/2": failure}
    await world.up()
    [view] = world.ingresses.views()
    assert (view.state, view.last_error) == ("waiting", str(failure).strip())
    assert len(world.ingresses.saved()[0].history.deaths_s) == 1
    await world.look()
    assert world.states() == [(2, "waiting")], "the second death is followed by a wait"
    await world.look(NOW_S + 2 * POLICY.first_backoff_s)
    assert world.states() == [(3, "ready")]


async def test_one_whose_actor_cannot_even_be_made_is_tried_again(
    world_of: WorldOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = world_of()
    monkeypatch.setattr(world.ray, "start", _raise_key_error)
    await world.up()
    [view] = world.ingresses.views()
    assert (view.incarnation, view.state, view.last_error) == (1, "waiting", "'unforeseen'")
    monkeypatch.undo()


def _raise_key_error(name: str, *arguments: object) -> None:
    raise KeyError("unforeseen")


async def test_one_that_is_unavailable_for_a_moment_is_kept(world_of: WorldOf) -> None:
    world = world_of()
    await world.up()
    actor = world.ray.by_name["raypd-ingress/0/1"]
    actor.failure = UNAVAILABLE
    await world.look()
    actor.failure = None
    await world.look()
    assert world.states() == [(1, "ready")]


async def test_one_that_stays_unavailable_is_replaced(world_of: WorldOf) -> None:
    world = world_of()
    await world.up()
    world.ray.by_name["raypd-ingress/0/1"].failure = UNAVAILABLE
    async with asyncio.timeout(60):
        while world.states() != [(2, "ready")]:
            await world.look()
            await asyncio.sleep(0.01)
    assert "it has not answered for" in world.ingresses.saved()[0].history.last_error


async def test_a_look_that_fails_by_a_bug_ends_one_incarnation_and_not_the_rounds(
    world_of: WorldOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = world_of(2)
    await world.up()
    with monkeypatch.context() as patch:
        patch.setattr(world.thing("raypd-ingress/0/1"), "health", _give_nonsense)
        await world.look()
    await world.look()
    assert world.states() == [(2, "ready"), (1, "ready")]
    assert "it could not be watched" in world.ingresses.saved()[0].history.last_error


async def _give_nonsense() -> str:
    return "well"


async def test_one_whose_event_loop_is_busy_is_kept_shown_and_told_later(world_of: WorldOf) -> None:
    world = world_of()
    await world.up()
    ingress = world.thing("raypd-ingress/0/1")
    told = list(ingress.versions)
    ingress.busy_s = 40.0
    for _ in range(3):
        await world.look()
    [view] = world.ingresses.views()
    assert (view.incarnation, view.state, view.busy_s) == (1, "busy", 40.0)
    assert ingress.versions == told, "it has no time to be told anything"

    ingress.busy_s = 0.0
    await world.look()
    [view] = world.ingresses.views()
    assert (view.incarnation, view.state, view.busy_s) == (1, "ready", 0.0)
    decisions = [decision.text for decision in world.journal.decisions if "event loop" in decision.text]
    assert decisions == [
        "the event loop of ingress 0, incarnation 1 has been busy with one thing for 40 s: it answers no client",
        "the event loop of ingress 0, incarnation 1 has time again, after more than 40 s",
    ]


async def test_one_whose_event_loop_stays_busy_is_replaced_with_the_reason(world_of: WorldOf) -> None:
    world = world_of()
    await world.up()
    world.thing("raypd-ingress/0/1").busy_s = 61.0
    await world.look()
    assert world.states() == [(2, "ready")]
    reason = "its event loop has been busy for 61 s (ingress.busy_timeout_s is 60)"
    assert world.ingresses.saved()[0].history.last_error == reason


async def test_a_busy_one_that_dies_is_replaced_at_once(world_of: WorldOf) -> None:
    world = world_of()
    await world.up()
    world.thing("raypd-ingress/0/1").busy_s = 40.0
    await world.look()
    world.ray.by_name["raypd-ingress/0/1"].die()
    await world.look()
    assert world.states() == [(2, "ready")]


async def test_a_hanging_one_keeps_nobody_waiting_and_is_replaced(world_of: WorldOf) -> None:
    world = world_of(2)
    await world.up()
    hanging = world.ray.by_name["raypd-ingress/0/1"]
    hanging.is_hanging = True
    async with asyncio.timeout(60):
        await world.ingresses.publish(Membership(7, ()))
    assert world.thing("raypd-ingress/1/1").versions[-1] == 7
    async with asyncio.timeout(60):
        while not hanging.is_dead:
            await world.look()
    await world.look()
    assert world.states() == [(2, "ready"), (1, "ready")]
    assert world.thing("raypd-ingress/0/2").versions[-1] == 7


async def test_one_that_was_not_told_is_told_again(world_of: WorldOf) -> None:
    world = world_of()
    await world.up()
    await world.ingresses.publish(Membership(3, ()))
    world.thing("raypd-ingress/0/1").versions.append(2)  # as if an older one were in force
    await world.look()
    assert world.thing("raypd-ingress/0/1").versions[-1] == 3


async def test_silence_is_nobodys_fault_while_rays_head_does_not_answer(
    world_of: WorldOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = world_of()
    await world.up()
    monkeypatch.setattr(HeadProbe, "silence_s", lambda probe, since_s: 0.0)
    world.ray.by_name["raypd-ingress/0/1"].is_hanging = True
    for _ in range(3):
        await world.look()
    assert world.states() == [(1, "ready")]


async def test_an_ingress_that_dies_during_a_canary_says_nothing_about_the_engines(world_of: WorldOf) -> None:
    world = world_of()
    await world.up()
    world.ray.by_name["raypd-ingress/0/1"].die()
    await world.ingresses.prove(None, ENGINE, FACTS, NOW_S)
    assert world.thing("raypd-ingress/0/2").proofs == ["decode-0"]


async def test_a_canary_that_fails_is_the_engines_fault(world_of: WorldOf, monkeypatch: pytest.MonkeyPatch) -> None:
    world = world_of()
    await world.up()
    monkeypatch.setattr(FakeIngress, "prove", _refuse)
    with pytest.raises(CannotStart, match="wrong tokens"):
        await world.ingresses.prove(None, ENGINE, FACTS, NOW_S)


async def _refuse(ingress: FakeIngress, *arguments: object) -> None:
    raise CannotStart("wrong tokens")


async def test_a_canary_and_a_round_do_not_both_replace_the_same_one(world_of: WorldOf) -> None:
    world = world_of()
    await world.up()
    world.ray.by_name["raypd-ingress/0/1"].die()
    await asyncio.gather(
        world.ingresses.prove(None, ENGINE, FACTS, NOW_S),
        world.look(),
        world.ingresses.prove(None, ENGINE, FACTS, NOW_S),
    )
    assert world.ray.started == ["raypd-ingress/0/1", "raypd-ingress/0/2"]


async def test_every_start_is_saved_before_it_is_made(world_of: WorldOf) -> None:
    world = world_of()
    await world.up()
    assert world.started_when_saved[:2] == [0, 1]


async def test_a_later_controller_goes_on_with_those_that_are_open(
    world_of: WorldOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = world_of(3)
    await world.up()
    await world.ingresses.publish(Membership(9, ()))
    saved = world.ingresses.saved()
    world.ray.by_name["raypd-ingress/1/1"].die()
    later = world.fleet(
        ClusterConfig(ingress=IngressConfig(count=3), heartbeat_interval_s=1.0, heartbeat_timeout_s=2.0)
    )
    await later.restore(saved, Membership(9, ()), FACTS)
    assert len(later.addresses) == 2
    await later.look(NOW_S)
    await later.settled()
    assert later.addresses == ["127.0.0.1:50051", "127.0.0.1:50052", "127.0.0.1:50053"]
    assert world.ray.alive == ["raypd-ingress/0/1", "raypd-ingress/1/2", "raypd-ingress/2/1"]


async def test_those_of_a_drained_node_leave_and_start_anew(world_of: WorldOf) -> None:
    world = world_of()
    await world.up()
    first = world.thing("raypd-ingress/0/1")
    await world.look(avoided={"node-a"})
    assert world.states() == [(2, "ready")]
    await world.ray.by_name["raypd-ingress/0/1"].ended()
    assert not first.is_open


async def test_all_are_drained_and_ended(world_of: WorldOf) -> None:
    world = world_of(2)
    await world.up()
    await world.ingresses.stop(0.0)
    for actor in world.ray.by_name.values():
        await actor.ended()
    assert not world.thing("raypd-ingress/0/1").is_open


async def test_one_that_takes_long_to_start_keeps_the_others_looked_after(
    world_of: WorldOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = world_of(2)
    await world.up()
    may_go_on = asyncio.Event()
    monkeypatch.setattr(FakeIngress, "place", lambda ingress: _place_behind(may_go_on))
    for name in ("raypd-ingress/0/1", "raypd-ingress/1/1"):
        world.ray.by_name[name].die()
        await world.ingresses.look(NOW_S)
        # A task of its own begins with the next turn of the loop, and waits for may_go_on.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert world.states() == [(2, "starting"), (2, "starting")]
    may_go_on.set()
    await world.ingresses.settled()
    assert world.states() == [(2, "ready"), (2, "ready")]


async def _place_behind(may_go_on: asyncio.Event) -> tuple[str, str]:
    await may_go_on.wait()
    return "node-a", "10.0.0.1"


async def test_a_canary_waits_for_an_ingress_instead_of_blaming_the_engine(world_of: WorldOf) -> None:
    world = world_of()
    await world.up()
    for incarnation in (1, 2):
        world.ray.by_name[f"raypd-ingress/0/{incarnation}"].die()
        await world.look()
    proving = asyncio.create_task(world.ingresses.prove(None, ENGINE, FACTS, NOW_S))
    await world.look()
    assert not proving.done()
    await world.look(NOW_S + 2 * POLICY.first_backoff_s)
    async with asyncio.timeout(60):
        await proving
    assert world.thing("raypd-ingress/0/3").proofs == ["decode-0"]


async def test_with_one_per_node_nodes_that_come_get_theirs_and_a_lost_nodes_is_not_replaced(
    world_of: WorldOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = ["node-a", "node-b"]

    def ray_nodes() -> list[dict[str, object]]:
        place = {"NodeManagerAddress": "10.0.0.1", "NodeManagerHostname": "host", "Resources": {}, "Labels": {}}
        return [{"NodeID": name, "Alive": True, **place} for name in there]

    world = world_of()
    world.ingresses = world.fleet(
        ClusterConfig(ingress=IngressConfig(per_node=True), heartbeat_interval_s=1.0, heartbeat_timeout_s=2.0),
    )
    monkeypatch.setattr(ray, "nodes", ray_nodes)
    await world.up()
    assert world.states() == [(1, "ready"), (1, "ready")]
    selectors = [world.ray.options_of[f"raypd-ingress/{number}/1"]["label_selector"] for number in (0, 1)]
    assert selectors == [{"ray.io/node-id": "node-a"}, {"ray.io/node-id": "node-b"}]

    there[:] = ["node-b", "node-c"]
    world.ray.by_name["raypd-ingress/0/1"].die()
    world.ray.by_name["raypd-ingress/1/1"].die()
    await world.look()
    assert world.ray.alive == ["raypd-ingress/0/2", "raypd-ingress/1/2"]
    selectors = [world.ray.options_of[f"raypd-ingress/{number}/2"]["label_selector"] for number in (0, 1)]
    assert selectors == [{"ray.io/node-id": "node-c"}, {"ray.io/node-id": "node-b"}]
    assert [one.home for one in world.ingresses.saved()] == ["node-c", "node-b"]


async def test_a_canary_waits_for_the_first_node_that_may_have_an_ingress(
    world_of: WorldOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    there: list[dict[str, object]] = []
    place = {
        "NodeManagerAddress": "10.0.0.1",
        "NodeManagerHostname": "host",
        "Resources": {"client_facing": 1},
        "Labels": {},
    }
    world = world_of()
    world.ingresses = world.fleet(
        ClusterConfig(
            ingress=IngressConfig(per_node=True, resources={"client_facing": 1}),
            heartbeat_interval_s=0.01,
            heartbeat_timeout_s=2.0,
        ),
    )
    monkeypatch.setattr(ray, "nodes", lambda: there)
    await world.ingresses.start_missing(NOW_S)
    proving = asyncio.create_task(world.ingresses.prove(None, ENGINE, FACTS, NOW_S))
    await asyncio.sleep(0)
    assert (
        world.ingresses.missing() == "no ingress is up: each needs {'client_facing': 1.0} on a node that is labelled {}"
    )
    there.append({"NodeID": "node-a", "Alive": True, **place})
    async with asyncio.timeout(60):
        await proving
    assert world.thing("raypd-ingress/0/1").proofs == ["decode-0"]
    assert world.ingresses.missing() == ""


async def test_settings_that_no_node_can_use_are_told_before_an_engine_is_waited_for(world_of: WorldOf) -> None:
    world = world_of(1, port=TAKEN_PORT)
    await world.ingresses.start_missing(NOW_S)
    assert world.ingresses.refusal == "", "it may still come up"
    await world.ingresses.settled()
    assert world.ingresses.refusal == f"node a: port {TAKEN_PORT} is taken"


async def test_an_ingress_that_can_serve_makes_up_for_one_that_cannot(world_of: WorldOf) -> None:
    world = world_of(2, port=TAKEN_PORT - 1)
    await world.ingresses.start_missing(NOW_S)
    await world.ingresses.settled()
    assert world.ingresses.refusal == ""


async def test_what_ray_cannot_start_yet_is_no_refusal(world_of: WorldOf) -> None:
    world = world_of()
    world.ray.failures[ingress_actor_name(0, 1)] = CANNOT_START["no node"]
    await world.ingresses.start_missing(NOW_S)
    await world.ingresses.settled()
    assert world.ingresses.refusal == ""


async def test_all_ingresses_but_the_asker_are_asked_for_records(world_of: WorldOf) -> None:
    world = world_of(3)
    await world.up()
    for number in range(3):
        world.thing(f"raypd-ingress/{number}/1").records = [bytes([number])]
    found = await world.ingresses.find_records(QUERY, "ingress-1")
    assert (found.records, found.unanswered) == ((b"\x00", b"\x02"), ())


async def test_ingresses_that_are_dead_or_down_are_named_and_the_others_answer(world_of: WorldOf) -> None:
    world = world_of(3)
    await world.up()
    for incarnation in (1, 2):
        world.ray.by_name[f"raypd-ingress/2/{incarnation}"].die()
        await world.look()
    world.ray.by_name["raypd-ingress/1/1"].die()
    world.thing("raypd-ingress/0/1").records = [b"here"]
    found = await world.ingresses.find_records(QUERY, "ingress-9")
    assert found.records == (b"here",)
    assert [one.ingress for one in found.unanswered] == ["ingress-1", "ingress-2"]
    assert "it is waiting: " in found.unanswered[1].reason


async def test_an_ingress_that_hangs_is_named_after_its_deadline(
    world_of: WorldOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingress_fleet, "_RECORDS_TIMEOUT_S", 0.05)
    world = world_of(2)
    await world.up()
    world.ray.by_name["raypd-ingress/1/1"].is_hanging = True
    async with asyncio.timeout(60):
        found = await world.ingresses.find_records(QUERY, "ingress-0")
    assert found.records == ()
    assert [isinstance(one, UnansweredIngress) and one.ingress for one in found.unanswered] == ["ingress-1"]


async def test_the_status_shows_how_each_ingress_has_routed(world_of: WorldOf) -> None:
    world = world_of()
    await world.up()
    routed = RoutingSummary(RoutingTotals((1, 2, 3, 4)))
    world.thing("raypd-ingress/0/1").routing = routed
    await world.look()
    assert [view.routing for view in world.ingresses.views()] == [routed]
