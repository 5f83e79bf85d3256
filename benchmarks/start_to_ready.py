"""How long does `raypd serve` take until it is ready, and how much memory and processor time do all its processes take?

Starts of two checkouts, or of one checkout with different arguments, in turns. Memory is the proportional set size
(PSS) of the driver and everything below it, summed at the ready line and again some seconds later, when the rest of the
KV pools has been taken. Processor time is theirs at the ready line, with that of children that have ended.

    python -m benchmarks.start_to_ready
    python -m benchmarks.start_to_ready --b ../another-checkout
    python -m benchmarks.start_to_ready --args-b "--config all_processes.yaml"
"""

from __future__ import annotations

import os
import shlex
import signal
import statistics
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import psutil
import typer
from rich.console import Console
from rich.table import Table

from cluster.bench.pairs import MIN_PAIRS, a_is_first, compare

_ROOT: Final = Path(__file__).parents[1]
_STOP_TIMEOUT_S: Final = 120.0
_MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Start:
    """The figures of one start.

    phases:       each line of progress, with the seconds after the start of the process
    later_pss_bytes: the memory after the wait
    """

    seconds: float
    cpu_s: float
    pss_bytes: int
    later_pss_bytes: int
    num_processes: int
    phases: tuple[tuple[float, str], ...]


@dataclass(frozen=True, slots=True)
class Usage:
    """The processor time, the memory and the number of a process and everything below it."""

    cpu_s: float
    pss_bytes: int
    num_processes: int


def run(
    a: Annotated[Path, typer.Option(help="Checkout A, which has a .venv.")] = _ROOT,
    b: Annotated[Path | None, typer.Option(help="Checkout B; default: A is measured alone.")] = None,
    args_a: Annotated[str, typer.Option(help="Further arguments of `raypd serve` for A.")] = "",
    args_b: Annotated[str, typer.Option(help="Further arguments of `raypd serve` for B.")] = "",
    pairs: Annotated[int, typer.Option(min=1, help="Number of starts of each; at least 5 for intervals.")] = MIN_PAIRS,
    wait_s: Annotated[float, typer.Option(min=0, help="Seconds from the ready line to the second look.")] = 10.0,
) -> None:
    """Start and stop in turns, and print the medians."""
    console = Console(width=140)
    sides = {"A": (a, args_a)}
    if b is not None or args_b:
        sides["B"] = (b or a, args_b)
    starts: dict[str, list[Start]] = {name: [] for name in sides}
    for pair in range(pairs):
        for name in sorted(sides, reverse=not a_is_first(pair)):
            checkout, arguments = sides[name]
            starts[name].append(one := measure(checkout, shlex.split(arguments), wait_s))
            console.print(f"{name} {pair + 1}/{pairs}: {one.seconds:.1f} s, {one.cpu_s:.1f} s of processor time")
    for name, (checkout, arguments) in sides.items():
        console.print(f"{name}: {checkout} {arguments}", highlight=False)
        for seconds, line in starts[name][-1].phases:
            console.print(f"  {seconds:7.2f} s  {line}", highlight=False, soft_wrap=True)
    console.print(table_of(starts))


def measure(checkout: Path, arguments: Sequence[str], wait_s: float) -> Start:
    """Start a cluster on free ports, measure it at its ready line and wait_s seconds later, and stop it.

    The checkout's own code runs, whichever code its virtual environment has installed, and Python keeps the bytecode.
    Raises RuntimeError if the start fails.
    """
    command = [str(checkout / ".venv/bin/raypd"), "serve", "--port", "0", "--http-port", "0", *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "RAYPD_"))}
    environment |= {"PYTHONUNBUFFERED": "1", "PYTHONPATH": str(checkout.resolve()), "PYTHONDONTWRITEBYTECODE": ""}
    started_s = time.monotonic()
    with subprocess.Popen(command, cwd=checkout, stdout=subprocess.PIPE, text=True, env=environment) as driver:
        assert driver.stdout is not None
        try:
            phases = []
            for line in driver.stdout:
                phases.append((time.monotonic() - started_s, line.strip()))
                if line.startswith("ready "):
                    break
            else:
                raise RuntimeError(f"the start has failed with status {driver.wait()}: {phases}")
            now = usage_of(driver.pid)
            time.sleep(wait_s)
            later = usage_of(driver.pid)
        finally:
            driver.send_signal(signal.SIGTERM)
            driver.stdout.read()
            driver.wait(_STOP_TIMEOUT_S)
    return Start(phases[-1][0], now.cpu_s, now.pss_bytes, later.pss_bytes, now.num_processes, tuple(phases))


def usage_of(pid: int) -> Usage:
    """Return what a process and everything below it have taken so far. Processes that end meanwhile are left out."""
    root = psutil.Process(pid)
    cpu_s, pss_bytes, num_processes = 0.0, 0, 0
    for process in [root, *root.children(recursive=True)]:
        try:
            times, memory = process.cpu_times(), process.memory_full_info()
        except psutil.NoSuchProcess:
            continue
        cpu_s += times.user + times.system + times.children_user + times.children_system
        pss_bytes += memory.pss
        num_processes += 1
    return Usage(cpu_s, pss_bytes, num_processes)


def table_of(starts: dict[str, list[Start]]) -> Table:
    """Return the medians of each side, and where there are two of at least MIN_PAIRS starts, their ratios."""
    figures = {
        "start to ready, s": [[one.seconds for one in side] for side in starts.values()],
        "processor time, s": [[one.cpu_s for one in side] for side in starts.values()],
        "PSS at the ready line, MiB": [[one.pss_bytes / _MIB for one in side] for side in starts.values()],
        "PSS later, MiB": [[one.later_pss_bytes / _MIB for one in side] for side in starts.values()],
        "processes": [[float(one.num_processes) for one in side] for side in starts.values()],
    }
    are_compared = len(starts) == 2 and len(starts["A"]) >= MIN_PAIRS
    table = Table(title="medians")
    for column in ("", *starts, *(["B / A (90 % interval)"] if are_compared else [])):
        table.add_column(column, justify="right" if column else "left")
    for name, sides in figures.items():
        cells = [f"{statistics.median(side):.1f}" for side in sides]
        if are_compared:
            compared = compare(*sides)
            cells.append(f"{compared.ratio:.2f} ({compared.low:.2f} to {compared.high:.2f})")
        table.add_row(name, *cells)
    return table


if __name__ == "__main__":
    typer.run(run)
