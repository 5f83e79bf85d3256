"""The report of a run of chaos, for people and for programs."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from tests.chaos.assault import FaultRecord
from tests.chaos.clients import Outcome, VisitResult
from tests.chaos.faults import DEATHS, ENDS_ATTEMPTS
from tests.chaos.watch import StatusWatch


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Quantiles of times in seconds; zeros if there were none."""

    num: int
    p50_s: float
    p99_s: float
    max_s: float


@dataclass(frozen=True, slots=True)
class ChaosReport:
    """One run.

    faults:            how many hit something, by kind
    outcomes:          of requests
    num_affected:      requests that were on an engine when it was lost, or were seen in a second attempt, or resumed
    pauses:            the longest pause of each of these
    pauses_by_kind:    the pause of each request that was on the engine which the fault hit, then, by kind of fault
    recomputed_tokens: whose KV was computed for the last attempt of each of these
    replacements:      from an engine's death, or its stop, until its next incarnation is ready
    errors:            of requests that ended as none may
    """

    fleet: str
    seed: int
    duration_s: float
    faults: dict[str, int]
    num_missed_faults: int
    outcomes: dict[str, int]
    num_affected: int
    pauses: Quantiles
    pauses_by_kind: dict[str, Quantiles]
    recomputed_tokens: int
    replacements: Quantiles
    errors: tuple[str, ...]

    def show(self, console: Console) -> None:
        """Print it as a table."""
        table = Table(title=f"chaos on {self.fleet} with seed {self.seed}, {self.duration_s:.0f} s", show_header=False)
        table.add_section()
        for kind, count in self.faults.items():
            table.add_row(kind, str(count))
        table.add_row("faults that found nothing to hit", str(self.num_missed_faults))
        table.add_section()
        for outcome, count in self.outcomes.items():
            table.add_row(f"requests: {outcome}", str(count))
        table.add_section()
        table.add_row("requests affected", str(self.num_affected))
        table.add_row("longest pause of an affected request", _cell(self.pauses))
        for kind, pauses in self.pauses_by_kind.items():
            table.add_row(f"pause by: {kind}", _cell(pauses))
        table.add_row("tokens computed again", str(self.recomputed_tokens))
        table.add_row("from an engine's death until its next incarnation is ready", _cell(self.replacements))
        console.print(table)
        for error in self.errors:
            console.print(error, markup=False, highlight=False, soft_wrap=True)

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


def make_report(
    fleet: str,
    seed: int,
    duration_s: float,
    records: Sequence[FaultRecord],
    results: Sequence[VisitResult],
    watch: StatusWatch,
) -> ChaosReport:
    """Put together what assault, clients and watch have seen."""
    hit = frozenset[str]().union(*(record.request_ids for record in records if record.fault.kind in ENDS_ATTEMPTS))
    affected = [result for result in results if result.request_id in hit | watch.affected]
    outcomes = Counter(result.outcome for result in results)
    replacements = [
        ready_s - record.at_s
        for record in records
        if record.fault.kind in DEATHS and record.num_hit
        if (ready_s := watch.ready_since.get((record.engine_id, record.incarnation + 1))) is not None
    ]
    return ChaosReport(
        fleet=fleet,
        seed=seed,
        duration_s=duration_s,
        faults=dict(sorted(Counter(record.fault.kind.value for record in records if record.num_hit).items())),
        num_missed_faults=sum(not record.num_hit for record in records),
        outcomes={outcome.value: outcomes[outcome] for outcome in Outcome},
        num_affected=len(affected),
        pauses=_quantiles([result.longest_pause_s for result in affected]),
        pauses_by_kind=_pauses_by_kind(records, results),
        recomputed_tokens=sum(result.num_computed_tokens for result in affected),
        replacements=_quantiles(replacements),
        errors=tuple(f"{result.request_id}: {result.outcome}: {result.error}" for result in results if result.error),
    )


def _pauses_by_kind(records: Sequence[FaultRecord], results: Sequence[VisitResult]) -> dict[str, Quantiles]:
    by_id = {result.request_id: result for result in results}
    pauses: defaultdict[str, list[float]] = defaultdict(list)
    for record in records:
        on_the_engine = (by_id[request_id].pause_at_s(record.at_s) for request_id in record.request_ids & by_id.keys())
        pauses[record.fault.kind.value] += [pause_s for pause_s in on_the_engine if pause_s is not None]
    return {kind: _quantiles(seconds) for kind, seconds in sorted(pauses.items()) if seconds}


def _quantiles(seconds: Sequence[float]) -> Quantiles:
    if not seconds:
        return Quantiles(0, 0.0, 0.0, 0.0)
    return Quantiles(
        len(seconds), float(np.percentile(seconds, 50)), float(np.percentile(seconds, 99)), float(max(seconds))
    )


def _cell(quantiles: Quantiles) -> str:
    if not quantiles.num:
        return "-"
    return f"p50 {quantiles.p50_s:.2f} s, p99 {quantiles.p99_s:.2f} s, max {quantiles.max_s:.2f} s ({quantiles.num})"
