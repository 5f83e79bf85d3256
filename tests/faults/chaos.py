"""Requests of every way with random faults, drawn from a seed: the same seed draws the same ones again.

They come in waves: a few requests at once, and a fault for some of the engines. Requests take every way: one engine of
either role, or a pair; some come with tokens that their clients have already. In some waves one role is left alone,
since all engines of the other one drain, and engines change their roles in the middle of a wave. Whatever fires is
dealt with while the wave goes on: the killed are started again under a new incarnation, the stopped go on after a
while. Every client must get its tokens, or, if it leaves early, the first of them; after all waves nothing may be left
in any engine.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Final

from actors.core.requests.request import EngineCoreRequest
from cluster.requests.moves.migration import MigrationPlanner
from cluster.requests.moves.rerouting import Rerouting
from cluster.requests.recovery import Recovery
from cluster.requests.recovery_decisions import RecoveryPolicy
from cluster.routing.base import EngineT, Route
from cluster.routing.decision import Way
from cluster.routing.engine_connection import EngineConnection, EngineRole
from tests.actors.core.chunk_bounds import ChunkBound
from tests.cluster.drawn_routes import DrawnRoutes, EndlessQueues, way_of
from tests.faults.engine_process import CallFailed, EngineProcess
from tests.faults.fault_points import Action, Fault, Point
from tests.faults.live_engines import IMPATIENT, LiveEngines, Question

ENGINES: Final = {"prefill-0": EngineRole.PREFILL, "decode-0": EngineRole.DECODE, "decode-1": EngineRole.DECODE}
_WITH_LARGE_BLOCKS: Final = "decode-1"
_CHECKED: Final = IMPATIENT.model_copy(update={"checksum": True})
_POOL_SIZE: Final = 512
"""Tokens: more at once than a few requests find no room at times, and are preempted."""
_NUM_TOKENS: Final = 8
_PROMPT_LENGTHS: Final = (3, 40, 96, 200)
_NUM_SEEDS: Final = 3
_POINTS: Final = (Point.BEFORE_CHUNK, Point.INSIDE_CHUNK, Point.AFTER_CHUNK)
_WEIGHTS: Final = {Action.KILL: 6, Action.CUT_DATA: 6, Action.CUT_CONTROL: 6, Action.FLIP: 4, Action.STOP: 3}
_REROUTE_AFTER_S: Final = 0.005
_WAVE_TIMEOUT_S: Final = 60.0
_BOUND: Final = ChunkBound(14e-3, "decode")
"""Beside a decode a step has a single token of a prompt, or a few."""
_DRAINED: Final = (frozenset[str](), frozenset({"prefill-0"}), frozenset({"decode-0", "decode-1"}))


@dataclass(frozen=True, slots=True)
class Visit:
    """One client. It leaves after so many tokens, or after so long, whatever happens then.

    way:         of its request, as long as there are engines for it
    num_resumed: tokens that it comes with
    """

    way: Way
    num_resumed: int
    num_prompt_tokens: int
    prompt_seed: int
    may_hit_cache: bool
    num_tokens: int
    leaves_after_s: float | None


@dataclass(frozen=True, slots=True)
class Trouble:
    """A fault of one engine.

    stopped_s: how long it stays stopped, if that is the fault
    after_s:   when it is killed or stopped, whatever it does then; None: at the point of a transfer
    """

    engine_id: str
    action: Action
    point: Point
    chunk: int
    stopped_s: float
    after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Switch:
    """The change of an engine's role, so long after the wave has begun."""

    engine_id: str
    role: EngineRole
    after_s: float


@dataclass(frozen=True, slots=True)
class Wave:
    """Visits, troubles and changes of roles that come at once. drained: engines that get no request in this wave"""

    visits: tuple[Visit, ...]
    troubles: tuple[Trouble, ...]
    switches: tuple[Switch, ...]
    drained: frozenset[str]


def draw_waves(seed: int, num_visits: int, num_at_once: int) -> list[Wave]:
    """All that will come: so many visits, so many in a wave."""
    rng = random.Random(seed)
    return [_draw_wave(rng, num_at_once) for _ in range(num_visits // num_at_once)]


def _draw_wave(rng: random.Random, num_visits: int) -> Wave:
    visits = tuple(
        Visit(
            way=rng.choice((Way.PREFILL_DECODE, *Way)),
            num_resumed=rng.choice((0, 0, 0, 2)),
            num_prompt_tokens=rng.choice(_PROMPT_LENGTHS),
            prompt_seed=rng.randrange(_NUM_SEEDS),
            may_hit_cache=rng.random() < 0.3,
            num_tokens=rng.choice((1, 3, *[_NUM_TOKENS] * 6)),
            leaves_after_s=rng.choice((0.001, 0.02, 0.05)) if rng.random() < 0.2 else None,
        )
        for _ in range(num_visits)
    )
    engine_ids = rng.sample(list(ENGINES), rng.choice((0, 1, 1, 2, 2)))
    troubles = [_draw_trouble(rng, engine_id) for engine_id in engine_ids]
    if len(troubles) == 2 and all(trouble.action is Action.KILL for trouble in troubles):
        # A request that loses two engines is given up: it may be what kills them.
        troubles.pop()
    roles = (EngineRole.PREFILL, EngineRole.DECODE, EngineRole.BOTH)
    switches = tuple(
        Switch(rng.choice(list(ENGINES)), rng.choice(roles), rng.choice((0.0, 0.01, 0.05)))
        for _ in range(rng.choice((0, 0, 1, 2)))
    )
    drained = rng.choices(_DRAINED, (4, 1, 1))[0]
    return Wave(visits, tuple(troubles), switches, drained)


def _draw_trouble(rng: random.Random, engine_id: str) -> Trouble:
    is_producer = ENGINES[engine_id] is EngineRole.PREFILL
    action = rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
    if is_producer and action in {Action.CUT_CONTROL, Action.FLIP}:
        action = Action.CUT_DATA
    point, chunk = rng.choice(_POINTS), rng.randint(1, 5)
    if action is Action.FLIP:
        point = Point.AFTER_CHUNK
    elif action in {Action.KILL, Action.STOP} and rng.random() < 0.3:
        point, chunk = Point.HEARING_READY if is_producer else Point.SAYING_READY, 1
    stopped_s = rng.choice((0.02, 0.1, 2 * IMPATIENT.chunk_timeout_s))
    is_timed = action in {Action.KILL, Action.STOP} and rng.random() < 0.4
    return Trouble(engine_id, action, point, chunk, stopped_s, rng.choice((0.005, 0.03)) if is_timed else None)


class _NotingRoutes(DrawnRoutes):
    """Counts the ways, and the requests that went elsewhere while they waited."""

    def __init__(self, visit: Visit, ways: Counter[Way]) -> None:
        super().__init__(visit.way, seed=visit.prompt_seed)
        self._ways = ways
        self.num_reroutes = 0

    def choose(self, request: EngineCoreRequest, engines: Sequence[EngineT]) -> Route[EngineT]:
        """Draw a route, and count its way."""
        route = super().choose(request, engines)
        self._ways[way_of(route)] += 1
        return route

    def reroute(self, waiting_id: str, again: EngineCoreRequest, engines: Sequence[EngineT]) -> Route[EngineT] | None:
        """Draw whether the request goes elsewhere, and count it."""
        route = super().reroute(waiting_id, again, engines)
        self.num_reroutes += route is not None
        return route


class ChaosRun:
    """An EnginePool of the engines that do not drain.

    It counts what happened: actions, ways, clients that got what they stayed for, and clients that left before.
    """

    def __init__(self, engines: LiveEngines) -> None:
        self._engines = engines
        self._processes: dict[str, EngineProcess] = {}
        self._drained: frozenset[str] = frozenset()
        # An engine answers one call at a time.
        self._calls = {engine_id: asyncio.Lock() for engine_id in ENGINES}
        self._planner = MigrationPlanner(engines.stats)
        # Most prompts wait for a few milliseconds only.
        self._rerouting = Rerouting(
            EndlessQueues(), lambda _, look: asyncio.get_running_loop().call_later(_REROUTE_AFTER_S, look)
        )
        self.happened: Counter[Action] = Counter()
        self.ways: Counter[Way] = Counter()
        self.num_migrations = self.num_reroutes = 0
        self.num_answered = 0
        self.num_left = 0

    def snapshot(self) -> list[EngineConnection]:
        """EnginePool: those that live and do not drain."""
        return [one for one in self._engines.snapshot() if one.descriptor.engine_id not in self._drained]

    def next_change(self) -> asyncio.Event:
        """EnginePool: set when an engine has come."""
        return self._engines.next_change()

    async def run(self, waves: list[Wave]) -> None:
        """Let all of it happen. Raises AssertionError, which names the wave."""
        for engine_id, role in ENGINES.items():
            block_size = 16 if engine_id == _WITH_LARGE_BLOCKS else 8
            self._processes[engine_id] = await self._engines.start(
                engine_id, role, transfer=_CHECKED, block_size=block_size, num_blocks=_POOL_SIZE // block_size
            )
            self._processes[engine_id].call("bound_chunks", _BOUND)
        for number, wave in enumerate(waves):
            try:
                async with asyncio.timeout(_WAVE_TIMEOUT_S):
                    await self._let_come(wave)
            except Exception as error:
                raise AssertionError(f"wave {number}: {wave}") from error
        await self._engines.check_whole(*self._processes.values())
        for engine_id, role in ENGINES.items():  # They are kept for other tests.
            await self._switch(Switch(engine_id, role, 0.0))

    async def _let_come(self, wave: Wave) -> None:
        self._drained = wave.drained
        for trouble in wave.troubles:
            if trouble.after_s is None:
                self._processes[trouble.engine_id].arm(self._fault(trouble))
        tending = [asyncio.create_task(self._tend(trouble)) for trouble in wave.troubles]
        try:
            async with asyncio.TaskGroup() as visits:
                for visit in wave.visits:
                    visits.create_task(self._visit(visit))
                for switch in wave.switches:
                    visits.create_task(self._switch(switch))
        finally:
            for trouble, task in zip(wave.troubles, tending, strict=True):
                await self._end_trouble(trouble, task)

    def _fault(self, trouble: Trouble) -> Fault:
        return Fault(trouble.action, trouble.point, trouble.chunk, peer=self._processes["prefill-0"].address)

    async def _tend(self, trouble: Trouble) -> None:
        """Wait for it, and do what has to be done about it."""
        process = self._processes[trouble.engine_id]
        if trouble.after_s is None:
            await process.wait_fired()
        else:
            await asyncio.sleep(trouble.after_s)
            process.signal(signal.SIGKILL if trouble.action is Action.KILL else signal.SIGSTOP)
        self.happened[trouble.action] += 1
        if trouble.action is Action.KILL:
            process = self._processes[trouble.engine_id] = await self._engines.restart(process)
            async with self._calls[trouble.engine_id]:
                await asyncio.to_thread(process.call, "bound_chunks", _BOUND)
        elif trouble.action is Action.STOP:
            await asyncio.sleep(trouble.stopped_s)
            process.signal(signal.SIGCONT)

    async def _switch(self, switch: Switch) -> None:
        """Change an engine's role, as controller and ingress do. One that is dead comes back in its new role."""
        await asyncio.sleep(switch.after_s)
        process = self._processes[switch.engine_id]
        process.role = switch.role
        try:
            async with self._calls[switch.engine_id]:
                await asyncio.to_thread(process.call, "set_role", switch.role.value)
        except (EOFError, OSError, CallFailed):
            await process.wait_dead()
            return
        self._engines.session(process).set_descriptor(process.descriptor)

    async def _end_trouble(self, trouble: Trouble, tending: asyncio.Task[None]) -> None:
        """If it has not come, it does not come any more; if it has, it is over when this returns."""
        process = self._processes[trouble.engine_id]
        if trouble.after_s is None and not tending.done() and await self._is_still_to_come(process):
            tending.cancel()
        await asyncio.gather(tending, return_exceptions=tending.cancelling() > 0)

    async def _is_still_to_come(self, process: EngineProcess) -> bool:
        try:
            return bool(await asyncio.to_thread(process.call, "disarm"))
        except (EOFError, OSError):
            return False  # It is dead.

    async def _visit(self, visit: Visit) -> None:
        question = self._engines.ask(
            num_prompt_tokens=visit.num_prompt_tokens,
            num_tokens=_NUM_TOKENS,
            seed=visit.prompt_seed,
            may_hit_cache=visit.may_hit_cache,
        )
        resumed = question.expected[: min(visit.num_resumed, visit.num_tokens - 1)]
        question = replace(question, request=replace(question.request, output_token_ids=resumed))
        try:
            async with asyncio.timeout(visit.leaves_after_s):
                token_ids = await self._read(question, visit)
        except TimeoutError:
            self.num_left += 1
            return
        assert token_ids == question.expected[: visit.num_tokens], question.request.request_id
        self.num_answered += 1

    async def _read(self, question: Question, visit: Visit) -> list[int]:
        """Read as many tokens as the client stays for."""
        token_ids = list(question.request.output_token_ids)
        routes = _NotingRoutes(visit, self.ways)
        recovery = Recovery(
            routes,
            self,
            question.request,
            None,
            RecoveryPolicy(max_attempts=4, engine_timeout_s=60.0),
            self._planner,
            rerouting=self._rerouting,
        )
        try:
            async with aclosing(recovery.outputs()) as outputs:
                async for output in outputs:
                    assert output.first_position == len(token_ids), question.request.request_id
                    token_ids += output.new_token_ids
                    if len(token_ids) >= visit.num_tokens:
                        break
        finally:
            self.num_migrations += recovery.num_migrations
            self.num_reroutes += routes.num_reroutes
        return token_ids
