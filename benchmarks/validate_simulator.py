"""Does the simulator predict what a real engine on a GPU did?

A run is simulated with raypd's own scheduler: the run's arrivals and lengths, its engine's settings (meta.json), and
tables of operators that were measured on such a GPU. One factor on all steps is then fitted to the first requests
of the run, so that their mean time per output token is the real one, and the run is simulated once more. The errors are
those of the means over all other requests. TTFT and E2E count from the arrival at the client, TPOT is the mean gap
after the first token.

    python -m benchmarks.validate_simulator --run RUN --ops OPS --shape SHAPE.json --limit 0.10

RUN has meta.json and requests.jsonl, OPS has attention.csv, dense.csv, per_sequence.csv and maybe moe.csv, all in the
form of LLMServingSim. SHAPE.json has num_layers, num_kv_heads, head_dim and num_kv_tokens (of one engine; what
meta.json says goes before it). The command ends with an error if a corrected error is larger than the limit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from actors.config import CacheConfig, SchedulerConfig
from actors.costs.step_cost_model import StepCostModel
from actors.costs.step_shape import NUM_FEATURES
from benchmarks.gpu_runs import GpuRun, RunRequest, read_gpu_run
from benchmarks.lockstep_engines import TokenTimes, run_in_lockstep
from cluster.errors import InvalidConfig
from cluster.routing.decision import RoutingMode
from cluster.routing.engine_connection import EngineRole
from cluster.settings.ingress import IngressConfig
from cluster.simulation.cluster_spec import ClusterSpec, EngineSpec, LinkSpec
from cluster.simulation.simulation_result import Outcome, SimulatedRequest
from cluster.simulation.simulator import simulate
from cluster.simulation.timing.gpu_data_sheets import data_sheet_in
from cluster.simulation.timing.model_shape import read_model_shape
from cluster.simulation.timing.op_tables import OpTables, read_op_tables
from cluster.simulation.workloads.workload_request import WorkloadRequest

METRICS: Final = ("E2E", "TTFT", "TPOT")
_NUM_FITTED: Final = 60
_MAX_FIT_ROUNDS: Final = 6
_FIT_TOLERANCE: Final = 0.001
_MAX_FACTOR: Final = 100.0
_DEFAULT_MODEL_LEN: Final = 1 << 20
_DEFAULT_LINK_GB_PER_S: Final = 32.0
_NO_LINKS: Final = LinkSpec(bytes_per_s=1e9, latency_s=0.0)
"""Nothing is handed over."""
_NO_COSTS: Final = StepCostModel((0.0,) * NUM_FEATURES)
"""Engines without roles are chosen by their load alone."""
_NO_LIMITS: Final = IngressConfig(max_requests_in_flight=1 << 30, max_waiting_tokens=1 << 60)


@dataclass(frozen=True, slots=True)
class Validation:
    """How far a simulated run is from the real one.

    real_s, uncorrected_s, corrected_s: means by METRICS, over the requests that nothing was fitted to
    factor:            the fitted factor on all steps
    num_judged:        how many requests these are
    num_extrapolated:  predictions that were not, as a whole, between measured points
    """

    real_s: dict[str, float]
    uncorrected_s: dict[str, float]
    corrected_s: dict[str, float]
    factor: float
    num_judged: int
    num_extrapolated: int

    def error(self, metric: str, *, is_corrected: bool) -> float:
        """Return simulated / real - 1."""
        simulated = self.corrected_s if is_corrected else self.uncorrected_s
        return simulated[metric] / self.real_s[metric] - 1

    @property
    def largest_error(self) -> float:
        """The size of the largest corrected error."""
        return max(abs(self.error(metric, is_corrected=True)) for metric in self.real_s)


def validate(run: GpuRun, tables: OpTables, num_kv_tokens: int, num_fitted: int = _NUM_FITTED) -> Validation:
    """Simulate a run with its tables, fit the factor, and compare.

    num_kv_tokens: tokens whose KV one engine has room for
    num_fitted:    requests, from the first one on, that the factor is fitted to
    Raises InvalidConfig if the run is not longer than that.
    """
    if not 1 <= num_fitted < len(run.requests):
        raise InvalidConfig("--fit-requests", [f"{num_fitted} of {len(run.requests)} requests leave none to judge"])
    real = [TokenTimes(request.first_token_s, request.end_s) for request in run.requests]
    fitted, judged = slice(None, num_fitted), slice(num_fitted, None)
    target = _means(run.requests[fitted], real[fitted])["TPOT"]
    if not target > 0:
        raise InvalidConfig("--fit-requests", [f"none of the first {num_fitted} requests has two tokens"])
    uncorrected = simulated = simulate_run(run, tables, num_kv_tokens)
    factor = 1.0
    for _ in range(_MAX_FIT_ROUNDS):
        ratio = target / _means(run.requests[fitted], simulated[fitted])["TPOT"]
        if abs(ratio - 1) < _FIT_TOLERANCE:
            break
        factor = min(max(factor * ratio, 1 / _MAX_FACTOR), _MAX_FACTOR)
        simulated = simulate_run(run, tables.slower_by(factor), num_kv_tokens)
    return Validation(
        real_s=_means(run.requests[judged], real[judged]),
        uncorrected_s=_means(run.requests[judged], uncorrected[judged]),
        corrected_s=_means(run.requests[judged], simulated[judged]),
        factor=factor,
        num_judged=len(run.requests) - num_fitted,
        num_extrapolated=tables.num_extrapolated,
    )


def simulate_run(run: GpuRun, tables: OpTables, num_kv_tokens: int) -> list[TokenTimes]:
    """Return when each request of a run would have got its tokens. Raises InvalidConfig if the engine refuses one."""
    workload = [
        WorkloadRequest(request.request_id, request.arrival_s, request.num_prompt_tokens, request.num_output_tokens)
        for request in run.requests
    ]
    scheduler = SchedulerConfig(
        max_num_seqs=run.max_num_seqs,
        max_num_batched_tokens=max(run.max_num_batched_tokens, run.max_num_seqs),
        enable_chunked_prefill=run.has_chunked_prefill,
        long_prefill_token_threshold=run.long_prefill_token_threshold,
        overlap=run.has_overlap,
        # vLLM keeps no blocks free for running requests, and knows no tenants.
        watermark=0.0,
        fairness="none",
    )
    # vLLM's first block is no request's.
    num_blocks = max(1, num_kv_tokens // run.block_size - 1)
    max_model_len = run.max_model_len or _DEFAULT_MODEL_LEN
    if tables.experts is not None and run.layout.data_parallel_size > 1:
        cache = CacheConfig(
            block_size=run.block_size, enable_prefix_caching=run.has_prefix_caching, enable_kv_events=False
        )
        try:
            return run_in_lockstep(workload, tables, scheduler, cache, num_blocks, max_model_len)
        except ValueError as error:
            raise InvalidConfig("the run", [str(error)]) from error
    engines = [
        EngineSpec(
            engine_id=f"both-{number}",
            role=EngineRole.BOTH,
            step_times=tables,
            num_blocks=num_blocks,
            scheduler=scheduler,
            block_size=run.block_size,
            max_model_len=max_model_len,
            step_costs=_NO_COSTS,
        )
        for number in range(run.layout.data_parallel_size)
    ]
    spec = ClusterSpec(tuple(engines), _NO_LINKS, 1, RoutingMode.AGGREGATE, ingress=_NO_LIMITS)
    return [_token_times(request) for request in simulate(spec, workload, seed=0).requests]


def _token_times(request: SimulatedRequest) -> TokenTimes:
    if request.outcome is not Outcome.COMPLETE:
        what = f"{request.num_prompt_tokens} prompt tokens"
        raise InvalidConfig("the run", [f"{request.request_id}: the simulated engine refuses {what}"])
    return TokenTimes(request.first_token_s, request.end_s)


def _means(requests: Sequence[RunRequest], times: Sequence[TokenTimes]) -> dict[str, float]:
    """Return the means by METRICS. Requests with a single token have no TPOT."""
    arrivals = np.array([request.arrival_s for request in requests])
    first = np.array([one.first_s for one in times])
    last = np.array([one.last_s for one in times])
    num_gaps = np.array([request.num_output_tokens - 1 for request in requests])
    has_gaps = num_gaps > 0
    tpot_s = float(np.mean((last - first)[has_gaps] / num_gaps[has_gaps])) if has_gaps.any() else math.nan
    return dict(zip(METRICS, (float(np.mean(last - arrivals)), float(np.mean(first - arrivals)), tpot_s), strict=True))


def table_of(found: Validation, title: str) -> Table:
    """Return the errors as a table."""
    table = Table("mean of", "real", "simulated", "error", "corrected", "error", title=title)
    for metric in found.real_s:
        unit, scale = ("ms", 1e3) if metric == "TPOT" else ("s", 1.0)
        cells = [
            f"{values[metric] * scale:.2f} {unit}" for values in (found.real_s, found.uncorrected_s, found.corrected_s)
        ]
        errors = [f"{found.error(metric, is_corrected=is_corrected):+.1%}" for is_corrected in (False, True)]
        table.add_row(metric, cells[0], cells[1], errors[0], cells[2], errors[1])
    return table


def load(
    run_directory: Path, ops: Path, shape_file: Path, link_gb_per_s: float | None = None
) -> tuple[GpuRun, OpTables, int]:
    """Read a run, its tables, and the size of one engine's KV cache. Raises InvalidConfig.

    link_gb_per_s: between the GPUs of the run, in 10^9 bytes a second; None: what the data sheet of the GPU says that
        meta.json or a directory names, or else 16 lanes of PCIe 4.0
    """
    run, shape = read_gpu_run(run_directory), read_model_shape(shape_file)
    if link_gb_per_s is None:
        sheets = map(data_sheet_in, (run.device_name, str(ops.resolve()), str(run_directory.resolve())))
        link_gb_per_s = next((sheet.link_gb_per_s for sheet in sheets if sheet is not None), _DEFAULT_LINK_GB_PER_S)
    tables = read_op_tables(ops, shape, run.layout, link_gb_per_s * 1e9)
    return run, tables, shape.num_kv_tokens if run.num_kv_tokens is None else run.num_kv_tokens


def main(
    run: Annotated[Path, typer.Option(help="Directory of the run: meta.json and requests.jsonl.")],
    ops: Annotated[Path, typer.Option(help="Directory of the tables of operators.")],
    shape: Annotated[Path, typer.Option(help="JSON file with the shape of the model and the size of its KV cache.")],
    limit: Annotated[float, typer.Option(min=0.0, help="Largest corrected error that passes; 0.1 is 10 %.")] = 0.10,
    fit_requests: Annotated[int, typer.Option(min=1, help="The factor is fitted to so many requests.")] = _NUM_FITTED,
    link_gb_per_s: Annotated[
        float | None,
        typer.Option(help="Bandwidth between the GPUs, in 10^9 bytes a second; default: that of the data sheet."),
    ] = None,
) -> None:
    """Compare a simulated run with the real one, and end with an error beyond the limit."""
    console = Console()
    try:
        real_run, tables, num_kv_tokens = load(run, ops, shape, link_gb_per_s)
        found = validate(real_run, tables, num_kv_tokens, fit_requests)
    except InvalidConfig as error:
        console.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from error
    layout = real_run.layout
    title = f"{run}: requests {fit_requests + 1} to {len(real_run.requests)}, data parallel {layout.data_parallel_size}"
    console.print(table_of(found, title))
    console.print(f"The factor on all steps, fitted to the first {fit_requests} requests: {found.factor:.3f}.")
    if found.num_extrapolated:
        console.print(f"[yellow]{found.num_extrapolated} predictions were extrapolated beyond the measured points.")
    if tables.exchange is not None:
        link = f"{tables.exchange.link_bytes_per_s / 1e9:.0f} GB/s"
        size = f"hidden states of about {tables.exchange.hidden_size:.0f} numbers"
        console.print(f"What ranks exchange is estimated: {size}, links of {link}.")
    elif max(layout.data_parallel_size, layout.tensor_parallel_size) > 1:
        console.print("[yellow]What ranks exchange is left out: the tables do not say how large the hidden states are.")
    if real_run.num_without_times:
        console.print(f"[yellow]{real_run.num_without_times} requests have no times, and were left out.")
    if not found.largest_error <= limit:
        console.print(f"[red]The largest corrected error, {found.largest_error:.1%}, is beyond the limit, {limit:.1%}.")
        raise typer.Exit(1)
    console.print(f"[green]All corrected errors are within {limit:.1%}.")


if __name__ == "__main__":
    typer.run(main)
