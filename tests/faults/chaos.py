"""Handoffs with random faults, drawn from a seed: the same seed draws the same ones again.

They come in waves: a few requests at once, and a fault for some of the engines. Whatever fires is dealt with while the
wave goes on: the killed are started again under a new incarnation, the stopped go on after a while. Every client must
get its tokens, or, if it leaves early, the first of them; after all waves nothing may be left in any engine.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from cluster.requests.recovery import Recovery
from cluster.requests.recovery_decisions import RecoveryPolicy
from cluster.routing.engine_connection import EngineRole
from cluster.routing.least_loaded import LeastLoadedPair
from tests.faults.engine_process import EngineProcess
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
_WAVE_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Visit:
    """One client. It leaves after so many tokens, or after so long, whatever happens then."""

    num_prompt_tokens: int
    prompt_seed: int
    may_hit_cache: bool
    num_tokens: int
    leaves_after_s: float | None


@dataclass(frozen=True, slots=True)
class Trouble:
    """A fault of one engine. stopped_s: how long it stays stopped, if that is the fault."""

    engine_id: str
    action: Action
    point: Point
    chunk: int
    stopped_s: float


@dataclass(frozen=True, slots=True)
class Wave:
    """Visits and troubles that come at once."""

    visits: tuple[Visit, ...]
    troubles: tuple[Trouble, ...]


def draw_waves(seed: int, num_visits: int, num_at_once: int) -> list[Wave]:
    """All that will come: so many visits, so many in a wave."""
    rng = random.Random(seed)
    return [_draw_wave(rng, num_at_once) for _ in range(num_visits // num_at_once)]


def _draw_wave(rng: random.Random, num_visits: int) -> Wave:
    visits = tuple(
        Visit(
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
    return Wave(visits, tuple(troubles))


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
    return Trouble(engine_id, action, point, chunk, stopped_s)


class ChaosRun:
    """Counts what happened: actions, clients that got what they stayed for, and clients that left before."""

    def __init__(self, engines: LiveEngines) -> None:
        self._engines = engines
        self._processes: dict[str, EngineProcess] = {}
        self.happened: Counter[Action] = Counter()
        self.num_answered = 0
        self.num_left = 0

    async def run(self, waves: list[Wave]) -> None:
        """Let all of it happen. Raises AssertionError, which names the wave."""
        for engine_id, role in ENGINES.items():
            block_size = 16 if engine_id == _WITH_LARGE_BLOCKS else 8
            self._processes[engine_id] = await self._engines.start(
                engine_id, role, transfer=_CHECKED, block_size=block_size, num_blocks=_POOL_SIZE // block_size
            )
        for number, wave in enumerate(waves):
            try:
                async with asyncio.timeout(_WAVE_TIMEOUT_S):
                    await self._let_come(wave)
            except Exception as error:
                raise AssertionError(f"wave {number}: {wave}") from error
        await self._engines.check_whole(*self._processes.values())

    async def _let_come(self, wave: Wave) -> None:
        for trouble in wave.troubles:
            self._processes[trouble.engine_id].arm(self._fault(trouble))
        tending = [asyncio.create_task(self._tend(trouble)) for trouble in wave.troubles]
        try:
            async with asyncio.TaskGroup() as visits:
                for visit in wave.visits:
                    visits.create_task(self._visit(visit))
        finally:
            for trouble, task in zip(wave.troubles, tending, strict=True):
                await self._end_trouble(trouble, task)

    def _fault(self, trouble: Trouble) -> Fault:
        return Fault(trouble.action, trouble.point, trouble.chunk, peer=self._processes["prefill-0"].address)

    async def _tend(self, trouble: Trouble) -> None:
        """Wait for it, and do what has to be done about it."""
        process = self._processes[trouble.engine_id]
        await process.wait_fired()
        self.happened[trouble.action] += 1
        if trouble.action is Action.KILL:
            self._processes[trouble.engine_id] = await self._engines.restart(process)
        elif trouble.action is Action.STOP:
            await asyncio.sleep(trouble.stopped_s)
            process.signal(signal.SIGCONT)

    async def _end_trouble(self, trouble: Trouble, tending: asyncio.Task[None]) -> None:
        """If it has not come, it does not come any more; if it has, it is over when this returns."""
        process = self._processes[trouble.engine_id]
        if not tending.done() and await self._is_still_to_come(process):
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
        token_ids: list[int] = []
        recovery = Recovery(
            LeastLoadedPair(),
            self._engines,
            question.request,
            None,
            RecoveryPolicy(max_attempts=4, engine_timeout_s=60.0),
        )
        async with aclosing(recovery.outputs()) as outputs:
            async for output in outputs:
                assert output.first_position == len(token_ids), question.request.request_id
                token_ids += output.new_token_ids
                if len(token_ids) >= visit.num_tokens:
                    break
        return token_ids
