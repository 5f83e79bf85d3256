"""Engines come up, are proven, serve, leave and die; and a later controller goes on with them.

Tests of cluster/pool/engines/engine_incarnation.py, cluster/pool/engines/engine_views.py,
cluster/pool/engines/role_change.py, cluster/pool/engines/start_progress.py, cluster/pool/models.py,
cluster/pool/owned_tasks.py, cluster/pool/ray_objects/heartbeat.py, cluster/pool/ray_objects/ray_actors.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from actors.attention_report import AttentionReport, OrderOffer
from actors.config import EngineConfig
from actors.core.outputs.scheduler_stats import SchedulerStats
from actors.engine_actor import EngineHealth, EngineReady
from actors.model_facts import ModelFacts
from cluster.config import ClusterConfig
from cluster.errors import CannotStart, EngineRefused, UnknownEngine
from cluster.pool.cluster_trust import ClusterTrust
from cluster.pool.engines.engine_fleet import EngineFleet
from cluster.pool.engines.engine_placement import EnginePlacement
from cluster.pool.journal import Journal
from cluster.pool.models import Models
from cluster.pool.ray_objects.head_probe import HeadProbe
from cluster.reconciling.engine_slots import EngineState, Slot
from cluster.reconciling.reconciler import reconcile
from cluster.routing.engine_connection import EngineDescriptor, EngineRole
from cluster.sessions.cluster_membership import Membership, ServedModel
from cluster.settings.restarts import RestartConfig
from kv_transfer.trust.membership import Trust, TrustMaterial
from tests.cluster.pool.fake_ray import CANNOT_START, FakeActor, FakeRay
from tests.kv_transfer.connected_workers import LAYOUT

P0, D0 = Slot(EngineRole.PREFILL, 0), Slot(EngineRole.DECODE, 0)
CONFIG = ClusterConfig(heartbeat_interval_s=0.02, heartbeat_timeout_s=60.0, drain_timeout_s=60.0, place_timeout_s=0.05)
IMPATIENT = CONFIG.model_copy(update={"heartbeat_timeout_s": 1.5, "drain_timeout_s": 0.5})
"""For silence, and drains, that come to their end."""


@dataclass
class FakeEngine:
    """The object behind an engine's actor."""

    config: EngineConfig
    engine_id: str
    incarnation: int
    resources: object
    num_running: int = 0
    num_asked: int = 0
    is_asked_to_end: bool = False
    error: str | None = None
    seconds_in_step: float = 0.0
    loop_busy_s: float = 0.0
    busy_from_look: int | None = None
    """With a request that came after the look before this one; looks are counted by num_asked."""
    may_load: asyncio.Event = field(default_factory=asyncio.Event)
    has_stopped: bool = False
    key_order: str | None = None
    role: str = ""
    refuses: bool = False
    trust: Trust = field(default_factory=Trust)

    def __post_init__(self) -> None:
        self.may_load.set()

    async def use_trust(self, material: TrustMaterial) -> int:
        self.trust.use(material)
        return self.trust.generation

    async def report_attention(self) -> AttentionReport:
        return AttentionReport((OrderOffer("vllm_cpu", "transposed", 0),))

    async def start(self, host: str | None, key_order: str | None = None) -> EngineReady:
        self.key_order = key_order
        assert self.trust.material is not None, "it was not given the cluster's secret first"
        await self.may_load.wait()
        address = f"{self.engine_id}:{self.incarnation}"
        layout = replace(LAYOUT, key_order=key_order or "plain")
        phases_s = {"loading weights": 2.04, "warming up": 0.5}
        return EngineReady(address, ModelFacts(64, 257, (256,), layout), "node-a", "10.0.0.1", phases_s)

    async def health(self) -> EngineHealth:
        self.num_asked += 1
        if self.num_asked == self.busy_from_look:
            self.num_running = 1
        stats = SchedulerStats(num_running_reqs=self.num_running)
        return EngineHealth(
            stats,
            self.seconds_in_step,
            not self.num_running,
            self.error,
            self.is_asked_to_end,
            self.trust.generation,
            loop_busy_s=self.loop_busy_s,
        )

    async def set_role(self, role: str) -> None:
        if self.refuses:
            raise RuntimeError("it does not answer")
        self.role = role

    async def progress(self) -> str:
        return "loading"

    async def wait_for_end(self, timeout_s: float) -> None:
        await asyncio.sleep(timeout_s)

    async def stop(self) -> None:
        self.has_stopped = True


class FakeIngresses:
    """Remembers what it is told; canaries come through unless `judge` says otherwise."""

    def __init__(self) -> None:
        self.published: list[Membership] = []
        self.proven: list[tuple[str, str]] = []
        self.unusable: set[int] = set()
        self.judge: Callable[[str, str], str | None] = lambda prefill, decode: None

    async def publish(self, membership: Membership) -> None:
        self.published.append(membership)

    async def prepare(self, model: ServedModel) -> None:
        if model.version in self.unusable:
            raise CannotStart("its tokenizer cannot be used")

    async def prove(
        self, prefill: EngineDescriptor | None, decode: EngineDescriptor, facts: ModelFacts, now_s: float
    ) -> None:
        pair = ("" if prefill is None else prefill.engine_id, decode.engine_id)
        self.proven.append(pair)
        if (reason := self.judge(*pair)) is not None:
            raise CannotStart(reason)


class World:
    """A fleet, and a controller's rounds for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, config: ClusterConfig = CONFIG) -> None:
        self.config = config
        self.ray = FakeRay(monkeypatch, FakeEngine)
        self.ingresses = FakeIngresses()
        self.journal = Journal()
        self.models = Models(self.config)
        self.changed = asyncio.Event()
        self.started_when_saved: list[int] = []
        self.wanted = [P0, D0]
        self.trust = ClusterTrust(None)
        self.trust.begin()
        monkeypatch.setattr(EnginePlacement, "reserve", _place)
        monkeypatch.setattr(EnginePlacement, "find", _place)
        monkeypatch.setattr("cluster.pool.engines.engine_fleet.alive_nodes", _no_nodes)
        self.fleet = self.make_fleet()

    def make_fleet(self) -> EngineFleet:
        ingresses: Any = self.ingresses
        fleet = EngineFleet(
            self.config,
            self.models,
            ingresses,
            self.journal,
            RestartConfig(),
            HeadProbe(),
            self._save,
            self.changed.set,
            self.trust,
        )
        fleet.may_prove.set()
        return fleet

    async def _save(self) -> None:
        self.started_when_saved.append(len(self.ray.started))

    async def rounds_until(self, is_so: Callable[[], bool]) -> None:
        """The controller's rounds, until it is so."""
        async with asyncio.timeout(60):
            while not is_so():
                observed, histories = self.fleet.observed(), self.fleet.histories
                newest = self.models.newest
                for action in reconcile(self.wanted, observed, histories, RestartConfig(), time.time(), newest):
                    await self.fleet.act(action)
                try:
                    await asyncio.wait_for(self.changed.wait(), 0.02)
                except TimeoutError:
                    continue
                self.changed.clear()

    async def up(self) -> None:
        await self.rounds_until(lambda: self.incarnations() == {"prefill-0": 1, "decode-0": 1})

    def incarnations(self) -> dict[str, int]:
        """Return the incarnation of each engine that serves."""
        return {engine.engine_id: engine.incarnation for engine in self.fleet if engine.state is EngineState.READY}

    def members(self) -> set[tuple[str, int]]:
        return {engine.key for engine in self.fleet.membership.engines}

    def actor(self, engine_id: str, incarnation: int = 1) -> FakeActor:
        return self.ray.by_name[f"raypd-engine/{engine_id}/{incarnation}"]

    def thing(self, engine_id: str, incarnation: int = 1) -> FakeEngine:
        engine = self.actor(engine_id, incarnation).thing
        assert isinstance(engine, FakeEngine)
        return engine

    def decisions(self) -> str:
        return "\n".join(decision.text for decision in self.journal.decisions)


class FakePlacement:
    """Room for everybody."""

    async def ready(self) -> None:
        return

    def strategy(self) -> None:
        return

    async def release(self) -> None:
        return


class FullPlacement(FakePlacement):
    """Room for nobody."""

    async def ready(self) -> None:
        await asyncio.Event().wait()

    def missing(self) -> str:
        return "it needs more than there is"


async def _place(*arguments: object) -> FakePlacement:
    return FakePlacement()


async def _no_nodes() -> list[object]:
    return []


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


@pytest.fixture
async def impatient_world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch, IMPATIENT)


async def test_engines_serve_once_they_are_proven_as_a_pair(world: World) -> None:
    world.fleet.may_prove.clear()
    await world.rounds_until(lambda: all(e.ready is not None for e in world.fleet) and len(world.fleet.observed()) == 2)
    assert not world.members()
    world.fleet.may_prove.set()
    await world.up()
    assert set(world.ingresses.proven) == {("prefill-0", "decode-0")}
    assert world.members() == {("prefill-0", 1), ("decode-0", 1)}
    assert world.ingresses.published[-1] == world.fleet.membership


async def test_the_start_says_how_long_each_phase_of_an_engine_took(world: World) -> None:
    await world.up()
    num_blocks = LAYOUT.num_blocks
    said = f"decode-0: loaded (loading weights 2.0 s, warming up 0.5 s), {num_blocks} KV blocks, at decode-0:1"
    assert said in world.fleet.progress.after(0)


async def test_all_engines_keep_keys_in_the_order_that_a_later_controller_finds(world: World) -> None:
    await world.up()
    assert {world.thing(name).key_order for name in ("prefill-0", "decode-0")} == {"transposed"}
    assert "order of keys in the KV cache: transposed, since vllm_cpu is the fastest" in world.decisions()

    earlier, world.fleet = world.fleet, world.make_fleet()
    await world.fleet.restore(earlier.saved(), earlier.histories, earlier.roles, earlier.membership)
    world.actor("decode-0").die()
    await world.rounds_until(lambda: world.incarnations() == {"prefill-0": 1, "decode-0": 2})
    assert world.thing("decode-0", 2).key_order == "transposed"


async def test_an_incarnation_is_saved_before_its_engine_is_started(world: World) -> None:
    await world.up()
    assert world.started_when_saved[0] == 0
    assert max(world.started_when_saved) == 2


async def test_an_engine_that_dies_leaves_at_once_and_is_replaced(world: World) -> None:
    await world.up()
    world.actor("decode-0").die()
    await world.rounds_until(lambda: world.incarnations() == {"prefill-0": 1, "decode-0": 2})
    assert world.members() == {("prefill-0", 1), ("decode-0", 2)}
    assert any(("decode-0", 1) not in {e.key for e in m.engines} for m in world.ingresses.published[-3:])


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (lambda engine: setattr(engine, "error", "IntegrityError: a block is free twice"), "a block is free twice"),
        (lambda engine: setattr(engine, "seconds_in_step", 61.0), "a step has taken 61 s"),
        (lambda engine: setattr(engine, "loop_busy_s", 61.0), "its event loop has been busy for 61 s"),
    ],
)
async def test_a_sick_engine_is_replaced(world: World, fault: Callable[[FakeEngine], None], said: str) -> None:
    await world.up()
    fault(world.thing("prefill-0"))
    await world.rounds_until(lambda: world.incarnations() == {"prefill-0": 2, "decode-0": 1})
    assert said in world.decisions()


async def test_a_silent_engine_is_replaced(impatient_world: World) -> None:
    world = impatient_world
    await world.up()
    world.actor("decode-0").is_hanging = True
    await world.rounds_until(lambda: world.incarnations() == {"prefill-0": 1, "decode-0": 2})
    assert "it has not answered for" in world.decisions()
    await world.actor("decode-0").ended()


async def test_silence_is_nobodys_fault_while_rays_head_does_not_answer(
    impatient_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = impatient_world
    await world.up()
    num_asked = 0

    def no_silence(probe: HeadProbe, since_s: float) -> float:
        nonlocal num_asked
        num_asked += 1
        return 0.0

    monkeypatch.setattr(HeadProbe, "silence_s", no_silence)
    world.actor("decode-0").is_hanging = True
    await world.rounds_until(lambda: num_asked >= 2)
    assert world.incarnations() == {"prefill-0": 1, "decode-0": 1}
    assert "give up" not in world.decisions()


async def test_whatever_an_engine_fails_to_start_with_it_is_given_up_and_tried_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeEngine, "start", _fail_to_start)
    world.wanted = [D0]
    await world.rounds_until(lambda: world.fleet.history(D0).last_incarnation == 2)
    assert "no such checkpoint" in world.fleet.history(D0).last_error


@pytest.mark.parametrize("failure", CANNOT_START.values(), ids=CANNOT_START)
async def test_an_engine_that_ray_cannot_start_is_given_up_with_the_reason_and_tried_again(
    world: World, failure: Exception
) -> None:
    world.wanted = [D0]
    world.ray.failures = {"raypd-engine/decode-0/1": failure}
    await world.rounds_until(lambda: world.incarnations() == {"decode-0": 2})
    assert world.fleet.history(D0).last_error == f"decode-0: {str(failure).strip()}"
    assert len(world.fleet.history(D0).deaths_s) == 1


async def _fail_to_start(engine: FakeEngine, host: str | None, key_order: str | None = None) -> EngineReady:
    raise ValueError("no such checkpoint")


async def test_a_canary_that_its_partner_did_not_survive_is_not_held_against_an_engine(world: World) -> None:
    await world.up()

    def judge(prefill: str, decode: str) -> str | None:
        if world.fleet.membership.version and not world.actor("prefill-0").is_dead:
            world.actor("prefill-0").die()
            return "prefill-0: the session broke"
        return None

    world.ingresses.judge = judge
    world.actor("decode-0").die()
    await world.rounds_until(lambda: world.incarnations() == {"prefill-0": 2, "decode-0": 2})
    assert len(world.fleet.history(D0).deaths_s) == 1
    assert len(world.fleet.history(P0).deaths_s) == 1


async def test_a_wrong_canary_is_held_against_the_engine_that_was_to_be_proven(world: World) -> None:
    await world.up()
    world.ingresses.judge = lambda prefill, decode: "tokens differ"
    world.actor("decode-0").die()
    await world.rounds_until(lambda: len(world.fleet.history(D0).deaths_s) == 2)
    assert world.incarnations() == {"prefill-0": 1}
    assert ("decode-0", 2) not in world.members()


async def test_a_drained_engine_ends_its_work_first_and_a_new_incarnation_follows(world: World) -> None:
    await world.up()
    engine = world.thing("decode-0")
    engine.num_running = 1
    await world.fleet.drain(world.fleet.serving("decode-0"), "asked for")
    assert world.fleet.membership.draining == {("decode-0", 1)}
    num_asked = engine.num_asked
    await world.rounds_until(lambda: engine.num_asked >= num_asked + 3)
    assert {e.slot: e.state for e in world.fleet}[D0] is EngineState.DRAINING
    engine.num_running = 0
    await world.rounds_until(lambda: world.incarnations() == {"prefill-0": 1, "decode-0": 2})
    await world.actor("decode-0").ended()
    assert engine.has_stopped
    assert not world.fleet.history(D0).deaths_s


async def test_a_drained_engine_ends_what_was_sent_to_it_before_the_ingress_knew(world: World) -> None:
    await world.up()
    engine = world.thing("decode-0")
    await world.fleet.drain(world.fleet.serving("decode-0"), "asked for")
    engine.busy_from_look = busy_from = engine.num_asked + 2
    await world.rounds_until(lambda: engine.num_asked >= busy_from + 3)
    assert {e.slot: e.state for e in world.fleet}[D0] is EngineState.DRAINING
    engine.num_running = 0
    await world.rounds_until(lambda: world.incarnations() == {"prefill-0": 1, "decode-0": 2})


async def test_a_drain_has_an_end(impatient_world: World) -> None:
    world = impatient_world
    await world.up()
    world.thing("decode-0").num_running = 1
    await world.fleet.drain(world.fleet.serving("decode-0"), "asked for")
    await world.rounds_until(lambda: world.incarnations() == {"prefill-0": 1, "decode-0": 2})


async def test_an_engine_whose_process_is_asked_to_end_is_drained(world: World) -> None:
    await world.up()
    world.thing("prefill-0").is_asked_to_end = True
    await world.rounds_until(lambda: world.incarnations() == {"prefill-0": 2, "decode-0": 1})
    assert "drain prefill-0, incarnation 1: its process was asked to end" in world.decisions()


async def test_a_role_outlives_the_engine_that_has_it(world: World) -> None:
    await world.up()
    await world.fleet.set_role(world.fleet.serving("prefill-0"), EngineRole.BOTH)
    assert world.thing("prefill-0").role == "both", "its steps follow the role, too"
    world.actor("prefill-0").die()
    await world.rounds_until(lambda: world.incarnations() == {"prefill-0": 2, "decode-0": 1})
    assert {e.engine_id: e.role for e in world.fleet.membership.engines}["prefill-0"] is EngineRole.BOTH
    assert world.thing("prefill-0", 2).config.role == "both"


async def test_a_role_that_the_engine_does_not_take_is_nobodys(world: World) -> None:
    await world.up()
    world.thing("prefill-0").refuses = True
    before = world.fleet.membership
    with pytest.raises(EngineRefused, match="prefill-0"):
        await world.fleet.set_role(world.fleet.serving("prefill-0"), EngineRole.BOTH)
    assert world.fleet.membership is before
    assert not world.fleet.roles


async def test_an_update_proves_engines_with_those_of_their_model(world: World) -> None:
    await world.up()
    world.ingresses.proven.clear()
    version = world.models.add("another-model")
    await world.rounds_until(lambda: world.incarnations() == {"prefill-0": 2, "decode-0": 2})
    assert world.ingresses.proven == [("", "prefill-0"), ("prefill-0", "decode-0")]
    assert [model.version for model in world.fleet.membership.models] == [version]
    assert {engine.model_version for engine in world.fleet.membership.engines} == {version}


async def test_an_update_goes_on_without_an_engine_that_has_found_no_room(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.up()
    unplaceable = Slot(EngineRole.DECODE, 1)
    monkeypatch.setattr(EnginePlacement, "reserve", _no_room_for_decode_engines)
    world.wanted = [P0, D0, unplaceable]
    await world.rounds_until(lambda: any(engine.finds_no_room for engine in world.fleet))
    monkeypatch.setattr(EnginePlacement, "reserve", _place_first_ones)
    world.models.add("another-model")
    await world.rounds_until(lambda: world.incarnations() == {"prefill-0": 2, "decode-0": 2})
    assert "model version 2 replaces version 1" in world.decisions()
    assert [engine.model_version for engine in world.fleet if engine.slot == unplaceable] == [2]


async def _no_room_for_decode_engines(*arguments: object) -> FakePlacement:
    return FullPlacement()


async def _place_first_ones(config: object, role: object, name: str, *arguments: object) -> FakePlacement:
    return FullPlacement() if "decode-1" in name else FakePlacement()


async def test_an_update_to_a_model_that_no_ingress_can_read_ends_with_its_first_engine(world: World) -> None:
    await world.up()
    world.ingresses.unusable.add(world.models.add("another-model"))
    await world.rounds_until(lambda: len(world.fleet.history(P0).deaths_s) == 2)
    assert world.fleet.history(P0).last_error == "its tokenizer cannot be used"
    assert world.members() == {("decode-0", 1)}


async def test_only_engines_that_serve_can_be_named(world: World) -> None:
    await world.up()
    with pytest.raises(UnknownEngine, match="no engine 'decode-9' serves; these do: decode-0, prefill-0"):
        world.fleet.serving("decode-9")


async def go_on(world: World) -> None:
    """Go on as a later controller."""
    saved, old = world.fleet.saved(), world.fleet
    world.fleet = world.make_fleet()
    await world.fleet.restore(saved, old.histories, old.roles, old.membership)


async def test_a_later_controller_takes_over_who_serves_without_a_question(world: World) -> None:
    await world.up()
    membership = world.fleet.membership
    await go_on(world)
    assert world.incarnations() == {"prefill-0": 1, "decode-0": 1}
    assert world.fleet.membership == membership
    world.actor("decode-0").die()
    await world.rounds_until(lambda: world.incarnations() == {"prefill-0": 1, "decode-0": 2})


async def test_a_later_controller_replaces_who_has_died_meanwhile(world: World) -> None:
    await world.up()
    world.actor("prefill-0").die()
    await go_on(world)
    assert world.members() == {("decode-0", 1)}
    await world.rounds_until(lambda: world.incarnations() == {"prefill-0": 2, "decode-0": 1})


async def test_a_later_controller_waits_for_who_is_still_loading(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    may_load = asyncio.Event()
    monkeypatch.setattr(FakeEngine, "__post_init__", lambda engine: setattr(engine, "may_load", may_load))
    await world.rounds_until(lambda: len(world.ray.started) == 2)
    await go_on(world)
    may_load.set()
    await world.up()
    assert len(world.ray.started) == 2


async def test_an_ingress_that_knows_a_newer_snapshot_does_not_miss_the_next_one(world: World) -> None:
    await world.up()
    await world.fleet.catch_up_with(50)
    assert world.ingresses.published[-1].version == 51
    assert world.members() == {("prefill-0", 1), ("decode-0", 1)}


async def test_in_the_end_nothing_is_left(world: World) -> None:
    await world.up()
    await world.fleet.stop()
    for engine_id in ("prefill-0", "decode-0"):
        await world.actor(engine_id).ended()
        assert world.thing(engine_id).has_stopped
