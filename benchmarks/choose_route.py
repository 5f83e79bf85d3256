"""Measure what it costs to choose a route by cost, without engines: a fleet of descriptors that have reported once.

The processor time of this thread is measured, per choice. A prompt of which no engine has a prefix is hashed up to its
first block only. The last column is for prompts that some engine has as a whole: they are hashed as a whole, which is
part of the choice, but not repeated when the request is sent.

    python -m benchmarks.choose_route
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.table import Table

from actors.core.outputs.scheduler_stats import LoadReport
from actors.core.outputs.sent_work import SentWork
from actors.core.requests.block_hash import PUBLIC_KEY
from actors.core.requests.request import EngineCoreRequest
from actors.core.requests.sampling_params import SamplingParams
from actors.costs.step_cost_model import KINDS, Residuals, StepCostModel
from cluster.routing.base import Route
from cluster.routing.cost_router import CostRouter
from cluster.routing.engine_connection import EngineDescriptor, EngineRole
from cluster.routing.load_book import LoadBook
from cluster.routing.prefix_aware import PrefixAwarePair

_BLOCK_SIZE: Final = 16
_COSTS: Final = StepCostModel(
    (5e-3, 2e-5, 1e-4, 0.0, 0.0, 0.0, 1e-5, 1e-8, 1e-3, 1e-8, 1e-9),
    tuple(Residuals(kind, 1000, -0.05, 0.0, 0.05, 0.02) for kind in KINDS),
)
_LOAD: Final = LoadReport(
    number=1,
    num_free_blocks=10_000,
    num_blocks=10_000,
    block_size=_BLOCK_SIZE,
    kv_bytes_per_token=100_000,
    max_num_batched_tokens=2048,
    max_num_seqs=256,
)


@dataclass(eq=False)
class _Engine:
    descriptor: EngineDescriptor
    load_report: LoadReport = _LOAD
    step_costs: StepCostModel | None = field(default=_COSTS)
    num_submitted_requests: int = 0
    num_prompt_tokens_computed: int = 0
    num_unfinished_requests: int = 0

    def announce(self, work: SentWork) -> None:
        """Tell nobody: there are no other ingresses."""

    def announce_left(self, work: SentWork) -> None:
        """Tell nobody: there are no other ingresses."""


def main(num_choices: Annotated[int, typer.Option(help="Choices for each figure.")] = 2000) -> None:
    """Print the microseconds of a choice among 10, 100 and 1000 engines, half of them of each role."""
    table = Table("engines", "prompt tokens", "µs a choice", "µs where a prefix is cached")
    for num_engines in (10, 100, 1000):
        for num_tokens in (256, 8192):
            unknown, known = (_measure(num_engines, num_tokens, num_choices, is_known=one) for one in (False, True))
            table.add_row(str(num_engines), str(num_tokens), f"{unknown:.1f}", f"{known:.1f}")
    Console().print(table)


def _measure(num_engines: int, num_tokens: int, num_choices: int, *, is_known: bool) -> float:
    """Return the microseconds of a choice. is_known: whether an engine has the prompts' prefix"""
    book = LoadBook()
    engines = [
        _Engine(EngineDescriptor(f"{role}-{number}", 1, role, "127.0.0.1:1"))
        for role in (EngineRole.PREFILL, EngineRole.DECODE)
        for number in range(num_engines // 2)
    ]
    for engine in engines:
        book.note_report(engine)
    pairs = PrefixAwarePair(_BLOCK_SIZE, hash_key=PUBLIC_KEY)
    router = CostRouter(pairs, book)
    requests = [_request(number, num_tokens, is_known=is_known) for number in range(num_choices)]
    if is_known:
        pairs.on_start(requests[0], Route(None, engines[-1]))
    router.choose(requests[0], engines)
    begin = time.thread_time()
    for request in requests:
        router.choose(request, engines)
    return (time.thread_time() - begin) / num_choices * 1e6


def _request(number: int, num_tokens: int, *, is_known: bool) -> EngineCoreRequest:
    prompt = list(range(num_tokens)) if is_known else list(range(number + 1, number + 1 + num_tokens))
    return EngineCoreRequest(
        request_id=f"r{number}", prompt_token_ids=prompt, sampling_params=SamplingParams(max_tokens=128)
    )


if __name__ == "__main__":
    typer.run(main)
