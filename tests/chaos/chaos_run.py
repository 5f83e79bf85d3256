"""One run: a cluster, clients, faults, and what has to hold during and after it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias

import psutil

from cluster.client import GenerateClient
from tests.chaos.answers import Asked
from tests.chaos.assault import Assault
from tests.chaos.clients import FAULTS_OF_OURS, Clients
from tests.chaos.cuts import CannotCut, check_can_cut
from tests.chaos.faults import CUTS, ENGINE_TIMEOUT_S, HEARTBEAT_TIMEOUT_S, TWO_AND_TWO, FaultKind, Fleet, draw_faults
from tests.chaos.processes import CONTROLLER, ENGINE, INGRESS, MarkedProcesses
from tests.chaos.ray_head import RayHead
from tests.chaos.reach import Reach
from tests.chaos.report import ChaosReport, make_report
from tests.chaos.visits import PATIENCE_S, draw_visits
from tests.chaos.watch import StatusWatch
from tests.integration.served import ServeProcess
from tests.patience import CLUSTER_S

ChaosCluster: TypeAlias = tuple[str, MarkedProcesses, Reach]

_IDLE_TIMEOUT_S: Final = PATIENCE_S + 30.0
_GONE_TIMEOUT_S: Final = 60.0
_GONE_INTERVAL_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class Chaos:
    """The parameters of a run; everything else follows from the seed.

    num_requests: at least; they go on coming until the last fault is over
    """

    seed: int
    num_requests: int
    num_faults: int
    requests_per_s: float = 5.0
    mean_delay_s: float = 1.5
    fleet: Fleet = TWO_AND_TWO
    kinds: Collection[FaultKind] = field(default_factory=lambda: frozenset(FaultKind))


@contextmanager
def chaos_cluster(model_directory: Path, directory: Path, fleet: Fleet = TWO_AND_TWO) -> Iterator[ChaosCluster]:
    """A cluster's address, its processes, and what reaches into them. At the end nothing may be left of it.

    The cluster ends by a SIGTERM to the process group of `raypd serve`. Raises AssertionError.

    directory: for its configuration
    """
    processes, reach = MarkedProcesses(), Reach(directory / "reach")
    memory_files: set[Path] = set()
    head, has_gone_well = RayHead(4, processes.environment | reach.environment), False
    try:
        head.wait_until_up()
        serve = ServeProcess(_config(model_directory, head.address, fleet), directory, environment=head.environment)
        try:
            address = serve.wait_until_ready()
            memory_files |= processes.memory_files()
            yield address, processes, reach
            memory_files |= processes.memory_files()
            assert serve.stop_group() == 0, "\n".join(serve.lines)
        finally:
            serve.kill_if_alive()
        assert not (left := head.leftovers()), f"after serve has stopped, Ray still has {left}"
        _check_gone([process for title in (CONTROLLER, INGRESS, ENGINE) for process in processes.titled(title)])
        has_gone_well = True
    except BaseException as error:
        error.add_note(f"Ray's logs are in {head.directory}")
        raise
    finally:
        head.stop(keeps_logs=not has_gone_well)
        left_over = _left_over(processes)
        for process in left_over:
            process.kill()
    assert not left_over, f"left running: {left_over}"
    left_files = [path for path in memory_files if path.exists()]
    assert not left_files, f"left behind: {left_files}"


async def run_chaos(
    chaos: Chaos, asked: Sequence[Asked], cluster: ChaosCluster, say: Callable[[str], None]
) -> ChaosReport:
    """Let clients and faults come, and wait until the cluster is whole and at rest. Raises AssertionError.

    cluster: as chaos_cluster() gives it
    say: is told of every fault, in words
    """
    faults = draw_faults(chaos.seed, chaos.num_faults, chaos.mean_delay_s, chaos.kinds, chaos.fleet.engine_ids)
    visits = draw_visits(chaos.seed, chaos.requests_per_s, len(asked))
    address, processes, reach = cluster
    watch, is_over = StatusWatch(address, chaos.fleet.engine_ids), asyncio.Event()
    assault = Assault(processes, reach, watch, say)
    async with watch.watching(), GenerateClient(address) as client:
        started_s = time.monotonic()
        clients = Clients(client, asked, f"chaos-{chaos.seed}")
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(clients.come(visits, chaos.num_requests, is_over))
            for fault in faults:
                await assault.carry_out(fault)
            await watch.until_calm(CLUSTER_S)
            is_over.set()
        duration_s = time.monotonic() - started_s
        await watch.until_idle(_IDLE_TIMEOUT_S)
    return make_report(str(chaos.fleet), chaos.seed, duration_s, assault.records, clients.results, watch)


def check_report(report: ChaosReport) -> None:
    """Nothing has happened that never may. Raises AssertionError."""
    bad = {outcome.value: count for outcome in FAULTS_OF_OURS if (count := report.outcomes[outcome.value])}
    assert not bad, f"seed {report.seed}: {bad}\n" + "\n".join(report.errors)


def possible_kinds() -> tuple[frozenset[FaultKind], str]:
    """Return what can be done on this machine, and why not all, if not."""
    try:
        check_can_cut()
    except CannotCut as error:
        return frozenset(FaultKind) - CUTS, str(error)
    return frozenset(FaultKind), ""


def _config(model_directory: Path, ray_address: str, fleet: Fleet) -> dict[str, object]:
    return {
        "model": {"model": str(model_directory), "dtype": "float32"},
        "cache": {"num_blocks": 256},
        "scheduler": {"max_num_batched_tokens": 48, "max_num_seqs": 32},
        "parallel": {"num_threads": 1},
        "prefill": {"count": fleet.num_prefill, "num_cpus": 0.5},
        "decode": {"count": fleet.num_decode, "num_cpus": 0.5},
        "ingress": {"engine_timeout_s": ENGINE_TIMEOUT_S},
        "kv_transfer": {"connect_timeout_s": 3.0, "chunk_timeout_s": 3.0, "handoff_timeout_s": 20.0},
        # Whoever dies as often as here would be quarantined.
        "restarts": {"first_backoff_s": 0.1, "max_backoff_s": 0.5, "max_deaths": 1000},
        "heartbeat_timeout_s": HEARTBEAT_TIMEOUT_S,
        "engine_host": "127.0.0.1",
        "ray": {"address": ray_address},
        "drain_timeout_s": 5,
    }


def _left_over(processes: MarkedProcesses) -> list[psutil.Process]:
    """Return who still lives after a while: Ray's own processes end by themselves, some of them after its head."""
    end_s = time.monotonic() + _GONE_TIMEOUT_S
    while (alive := list(processes.all())) and time.monotonic() < end_s:
        time.sleep(_GONE_INTERVAL_S)
    return alive


def _check_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=_GONE_TIMEOUT_S)
    assert not alive, f"after serve has stopped, these run on: {[' '.join(process.cmdline()) for process in alive]}"
