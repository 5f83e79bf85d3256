"""Engines in virtual time behind routers by cost: steps take as long as cost models say, and reports come late."""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Final

from actors.core.outputs.scheduler_stats import LoadReport
from actors.core.outputs.sent_work import SentWork
from actors.core.requests.request import EngineCoreRequest
from actors.costs.step_cost_model import StepCostModel
from actors.costs.step_shape import StepShape
from cluster.routing.base import Route
from tests.cluster.routing.cost_setup import BLOCK_SIZE, Clock, Cluster, FakeEngine, cost_model, engine, request

_BUDGET: Final = 2048
_NUM_BLOCKS: Final = 10_000


@dataclass(eq=False)
class Job:
    """A request at an engine. consumer: the engine that decodes; None: this one does"""

    num_prompt_left: int
    num_context: int
    num_output_left: int
    on_end: Callable[[], None]
    consumer: VirtualEngine | None = None


@dataclass(eq=False)
class VirtualEngine:
    """Executes what it is sent, first come first served, all decodes in every step."""

    name: str
    slowness: float = 1.0
    now_s: float = 0.0
    prompts: deque[Job] = field(default_factory=deque)
    decodes: list[Job] = field(default_factory=list)
    num_computed: int = 0
    num_taken: int = 0

    def __post_init__(self) -> None:
        self.model = cost_model(self.slowness)

    def run(self, until_s: float) -> None:
        """Execute steps up to a time; the last one may end later."""
        while self.now_s < until_s:
            if not self.prompts and not self.decodes:
                self.now_s = until_s
                return
            self._step()

    def _step(self) -> None:
        num_left, chunks = _BUDGET - len(self.decodes), []
        for job in self.prompts:
            if num_left <= 0:
                break
            chunks.append((job, min(job.num_prompt_left, num_left)))
            num_left -= chunks[-1][1]
        num_tokens = sum(size for _, size in chunks)
        shape = StepShape(
            num_tokens + len(self.decodes),
            len(self.decodes),
            sum(job.num_context for job in self.decodes),
            len(chunks),
            0,
            sum(size * size / 2 for _, size in chunks),
        )
        self.now_s += self.model.seconds(shape)
        self.num_computed += num_tokens
        for job in self.decodes[:]:
            self._take_token(job)
        for job, size in chunks:
            job.num_prompt_left -= size
            if not job.num_prompt_left:
                self.prompts.remove(job)
                (job.consumer or self).decodes.append(job)
                (job.consumer or self)._take_token(job)

    def _take_token(self, job: Job) -> None:
        job.num_context += 1
        job.num_output_left -= 1
        if job.num_output_left <= 0:
            self.decodes.remove(job)
            job.on_end()

    def report(self) -> LoadReport:
        """The load, as an engine reports it; the numbers of a session are left out."""
        coming = [job.num_context for job in self.prompts if job.consumer is None]
        tokens = sum(job.num_context for job in self.decodes)
        used = (tokens + sum(job.num_context for job in self.prompts)) // BLOCK_SIZE
        return LoadReport(
            num_waiting_tokens=sum(job.num_prompt_left for job in self.prompts),
            num_decodes=len(self.decodes),
            num_decode_context_tokens=tokens,
            num_coming_decodes=len(coming),
            num_coming_context_tokens=sum(coming),
            num_free_blocks=_NUM_BLOCKS - used,
            num_blocks=_NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            kv_bytes_per_token=1000,
            max_num_batched_tokens=_BUDGET,
            max_num_seqs=256,
            num_taken_from_all=self.num_taken,
        )


class Ingress:
    """A router with sessions of its own, on the common clock."""

    def __init__(self, engines: Sequence[VirtualEngine], clock: Clock) -> None:
        self.sessions: list[FakeEngine] = [engine(one.name, cost_model(one.slowness)) for one in engines]
        self.cluster = Cluster(*self.sessions, clock=clock)

    def hear_of_others(self, index: int, num_taken: int, works: Sequence[SentWork], left: Sequence[SentWork]) -> None:
        """Take in what an engine tells of other ingresses' requests."""
        self.cluster.book.note_announced(self.sessions[index], num_taken, works, left)

    def hear(self, index: int, report: LoadReport, num_taken: int, num_computed: int) -> None:
        """Take in what an engine reports."""
        session = self.sessions[index]
        assert session.load_report is not None
        number = session.load_report.number + 1
        session.load_report = replace(report, number=number, num_taken_requests=num_taken)
        session.num_prompt_tokens_computed = num_computed
        self.cluster.book.note_report(session)


@dataclass(frozen=True)
class Sent:
    """A request that was sent. ingress: the number of the one that sent it"""

    at_s: float
    route: Route[FakeEngine]
    ingress: int

    @property
    def engine_ids(self) -> set[str]:
        engines = (self.route.prefill, self.route.decode)
        return {one.descriptor.engine_id for one in engines if one is not None}

    @property
    def decode_id(self) -> str:
        return self.route.decode.descriptor.engine_id


class World:
    """Engines and ingresses; reports come every report_every_s, and are as old as late_s when they come."""

    def __init__(
        self,
        names: Sequence[str],
        *,
        slowness: Mapping[str, float] | None = None,
        num_ingresses: int = 1,
        report_every_s: float = 0.5,
        late_s: float = 5.0,
        seed: int = 1,
    ) -> None:
        self.clock = Clock(0.0)
        self.engines = [VirtualEngine(name, (slowness or {}).get(name, 1.0)) for name in names]
        self._by_id = {one.name: one for one in self.engines}
        self.ingresses = [Ingress(self.engines, self.clock) for _ in range(num_ingresses)]
        self._report_every_s, self._late_s = report_every_s, late_s
        self._due: deque[tuple[float, int, int, LoadReport, int, int]] = deque()
        self._next_report_s = 0.0
        self._draw = random.Random(seed)
        self.sent: list[Sent] = []
        self.latencies_s: list[float] = []

    def add_ingress(self) -> None:
        """An ingress that knows nothing of what the engines have."""
        self.ingresses.append(Ingress(self.engines, self.clock))

    def offer(self, rate_per_s: float, duration_s: float, num_tokens: int = 512, num_output_tokens: int = 64) -> None:
        """Send requests at random times, each to an ingress that is drawn."""
        end_s = self.clock() + duration_s
        while (next_s := self.clock() + self._draw.expovariate(rate_per_s)) < end_s:
            self._advance(next_s)
            # Ids and prompts of their own: the same run again is the same.
            number = len(self.sent)
            wanted = replace(request(num_tokens, num_output_tokens, number), request_id=f"request {number}")
            self._send(self._draw.randrange(len(self.ingresses)), wanted)
        self._advance(end_s)

    def set_model(self, name: str, model: StepCostModel) -> None:
        """Let an engine take another time from now on; its own cost model has noticed that."""
        self._by_id[name].model = model
        for ingress in self.ingresses:
            for session in ingress.sessions:
                if session.descriptor.engine_id == name:
                    session.step_costs = model
                    ingress.cluster.book.note_report(session)

    def silence(self) -> None:
        """No report comes any more."""
        self._due.clear()
        self._next_report_s = math.inf

    def shares(self, window_s: float) -> list[Counter[str]]:
        """How many requests each engine got to decode, in each window of time."""
        windows: list[Counter[str]] = []
        for one in self.sent:
            while len(windows) <= one.at_s // window_s:
                windows.append(Counter(dict.fromkeys(self._by_id, 0)))
            windows[-1][one.decode_id] += 1
        return windows

    def _send(self, number: int, wanted: EngineCoreRequest) -> None:
        cluster, began_s = self.ingresses[number].cluster, self.clock()
        route = cluster.send(wanted)
        decode = self._by_id[route.decode.descriptor.engine_id]

        def on_end() -> None:
            cluster.end(wanted, route, wanted.sampling_params.max_tokens)
            self._tell_others(number)
            self.latencies_s.append(decode.now_s - began_s)

        first = decode if route.prefill is None else self._by_id[route.prefill.descriptor.engine_id]
        num_tokens = len(wanted.prompt_token_ids)
        consumer = None if first is decode else decode
        first.prompts.append(Job(num_tokens, num_tokens, wanted.sampling_params.max_tokens, on_end, consumer))
        for one in {first, decode}:
            one.num_taken += 1
        self._tell_others(number)
        self.sent.append(Sent(began_s, route, number))

    def _tell_others(self, number: int) -> None:
        for index, session in enumerate(self.ingresses[number].sessions):
            works, session.announced = session.announced, []
            left, session.left = session.left, []
            for other in self.ingresses if works or left else ():
                if other is not self.ingresses[number]:
                    other.hear_of_others(index, self.engines[index].num_taken, works, left)

    def _advance(self, to_s: float) -> None:
        while self._next_report_s <= to_s:
            self._run(self._next_report_s)
            self._note_reports()
            self._next_report_s += self._report_every_s
        self._run(to_s)

    def _run(self, to_s: float) -> None:
        self.clock.now_s = to_s
        for one in self.engines:
            one.run(to_s)
        while self._due and self._due[0][0] <= to_s:
            _, number, index, report, num_taken, num_computed = self._due.popleft()
            self.ingresses[number].hear(index, report, num_taken, num_computed)

    def _note_reports(self) -> None:
        for number, ingress in enumerate(self.ingresses):
            for index, one in enumerate(self.engines):
                num_taken = ingress.sessions[index].num_submitted_requests
                at_s = self.clock() + self._late_s
                self._due.append((at_s, number, index, one.report(), num_taken, one.num_computed))


def largest_change(windows: Sequence[Counter[str]]) -> float:
    """Return the largest change of an engine's share from one window to the next."""
    shares = [{name: num / max(sum(window.values()), 1) for name, num in window.items()} for window in windows]
    return max((abs(one[name] - other[name]) for one, other in pairwise(shares) for name in one), default=0.0)
