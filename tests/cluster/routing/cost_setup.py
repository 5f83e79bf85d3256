"""Makes engines that report, and requests, for tests of routing by cost."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

from actors.core.outputs.scheduler_stats import LoadReport
from actors.core.outputs.sent_work import SentWork
from actors.core.requests.block_hash import PUBLIC_KEY
from actors.core.requests.request import EngineCoreRequest
from actors.core.requests.sampling_params import SamplingParams
from actors.costs.step_cost_model import KINDS, Residuals, StepCostModel
from cluster.routing.base import Route
from cluster.routing.cost_router import CostRouter
from cluster.routing.decision import RoutingMode
from cluster.routing.engine_connection import EngineDescriptor, EngineRole
from cluster.routing.load_book import LoadBook
from cluster.routing.prefix_aware import PrefixAwarePair
from kv_transfer.link_load import LinkLoad
from kv_transfer.links.link_compatibility import PairingFacts

BLOCK_SIZE = 16
# A step of 5 ms, 0.1 ms a token above 16, and 10 ns for each token of context that a decode reads.
COEFFICIENTS = (5e-3, 2e-5, 1e-4, 0.0, 0.0, 0.0, 1e-5, 1e-8, 1e-3, 1e-8, 1e-9)
_NUMBERS = itertools.count()


def cost_model(slowness: float = 1.0, kinds: tuple[str, ...] = KINDS, error: float = 0.02) -> StepCostModel:
    residuals = tuple(
        Residuals(kind, 1000, -error, 0.0, error, error / 2) if kind in kinds else Residuals(kind) for kind in KINDS
    )
    return StepCostModel(tuple(slowness * one for one in COEFFICIENTS), residuals)


@dataclass
class Clock:
    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


@dataclass(eq=False)
class FakeEngine:
    """An engine that serves, and its session."""

    descriptor: EngineDescriptor
    step_costs: StepCostModel | None = field(default_factory=cost_model)
    load_report: LoadReport | None = None
    num_submitted_requests: int = 0
    num_prompt_tokens_computed: int = 0
    num_unfinished_requests: int = 0
    announced: list[SentWork] = field(default_factory=list)
    left: list[SentWork] = field(default_factory=list)

    def announce(self, work: SentWork) -> None:
        self.announced.append(work)

    def announce_left(self, work: SentWork) -> None:
        self.left.append(work)

    def reports(self, **numbers: float | tuple[LinkLoad, ...]) -> None:
        """Make the next report; what is not named is as in an idle engine. Each decode has 1000 tokens of context."""
        number = 1 if self.load_report is None else self.load_report.number + 1
        idle = LoadReport(
            number=number,
            num_free_blocks=10_000,
            num_blocks=10_000,
            block_size=BLOCK_SIZE,
            kv_bytes_per_token=100_000,
            max_num_batched_tokens=2048,
            max_num_seqs=256,
            num_taken_requests=self.num_submitted_requests,
            num_taken_from_all=self.num_submitted_requests,
        )
        report = replace(idle, **numbers)  # type: ignore[arg-type]  # The names are the report's.
        context = report.num_decode_context_tokens or 1000 * report.num_decodes
        self.load_report = replace(report, num_decode_context_tokens=context)


def engine(
    name: str,
    model: StepCostModel | None = None,
    *,
    pairing: PairingFacts | None = None,
    is_unsure: bool = False,
    **numbers: int | tuple[LinkLoad, ...],
) -> FakeEngine:
    """Make an engine that has reported. name: as prefill-0"""
    role = EngineRole(name.rpartition("-")[0])
    made = FakeEngine(EngineDescriptor(name, 1, role, f"{name}:1", pairing=pairing))
    made.step_costs = None if is_unsure else model or cost_model()
    made.reports(**numbers)
    return made


def request(num_tokens: int = 256, max_tokens: int = 128, first_token: int | None = None) -> EngineCoreRequest:
    """Make a request whose prompt is unlike all others, or begins with the given token."""
    number = next(_NUMBERS)
    first = number + 1000 if first_token is None else first_token
    prompt = list(range(first, first + num_tokens))
    return EngineCoreRequest(
        request_id=f"request {number}", prompt_token_ids=prompt, sampling_params=SamplingParams(max_tokens=max_tokens)
    )


class Cluster:
    """A router, its load book, and the engines."""

    def __init__(self, *engines: FakeEngine, mode: RoutingMode = RoutingMode.COST, clock: Clock | None = None) -> None:
        self.clock = clock or Clock()
        self.book = LoadBook(self.clock)
        is_aggregated = mode is RoutingMode.AGGREGATE
        self.pairs = PrefixAwarePair(BLOCK_SIZE, hash_key=PUBLIC_KEY, is_aggregated=is_aggregated)
        self.router = CostRouter(self.pairs, self.book, mode)
        self.engines = list(engines)
        self.all_report()

    def all_report(self) -> None:
        for one in self.engines:
            self.book.note_report(one)

    def choose(self, wanted: EngineCoreRequest) -> Route[FakeEngine]:
        return self.router.choose(wanted, self.engines)

    def send(self, wanted: EngineCoreRequest) -> Route[FakeEngine]:
        """Choose, and submit the request to the engines of the route."""
        route = self.choose(wanted)
        for one in (route.prefill, route.decode):
            if one is not None:
                one.num_submitted_requests += 1
        self.router.on_start(wanted, route)
        return route

    def end(self, wanted: EngineCoreRequest, route: Route[FakeEngine], num_output_tokens: int = 128) -> None:
        """Let the request finish."""
        self.router.on_end(wanted, list(range(num_output_tokens)), route)
        self.router.on_leave(wanted.request_id)

    def ids(self, wanted: EngineCoreRequest) -> tuple[str | None, str]:
        """Choose, and return the ids of the prefill and the decode engine."""
        route = self.choose(wanted)
        return None if route.prefill is None else route.prefill.descriptor.engine_id, route.decode.descriptor.engine_id
