"""Does one stream decode faster if OpenMP's threads spin between operators, and what does spinning cost?

Engines get OMP_WAIT_POLICY=PASSIVE (actors/process/openmp.py). Each run is a process of its own, since OpenMP reads its
variables once: it decodes one request, and prints the time of a token and the processor time of all threads. Runs with
PASSIVE and with each other setting come in turns. Run it with nothing else on the machine, and with --busy, which keeps
one process busy beside it, as an ingress would be.

    python -m benchmarks.openmp_wait --threads 2 --pairs 7
    python -m benchmarks.openmp_wait --threads 2 --pairs 7 --busy
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.table import Table

from cluster.bench.pairs import MIN_PAIRS, a_is_first, compare
from cluster.config import DEMO_MODEL

_PASSIVE: Final = "PASSIVE"
_NAMES: Final = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
_RUN_TIMEOUT_S: Final = 300.0
_NUM_WARM_STEPS: Final = 5


def run(
    model: Annotated[Path, typer.Option(help="Directory of the checkpoint.")] = DEMO_MODEL,
    dtype: Annotated[str, typer.Option()] = "bfloat16",
    threads: Annotated[int, typer.Option(min=2, help="A single thread has nobody to wait for.")] = 2,
    context: Annotated[int, typer.Option(min=1)] = 256,
    steps: Annotated[int, typer.Option(min=10)] = 100,
    pairs: Annotated[int, typer.Option(min=MIN_PAIRS)] = MIN_PAIRS,
    spin_counts: Annotated[str, typer.Option(help="Values of GOMP_SPINCOUNT to compare with PASSIVE.")] = "1000,100000",
    busy: Annotated[bool, typer.Option("--busy", help="Keep one further process busy.")] = False,
    dummy: Annotated[bool, typer.Option(help="Draw the weights; the directory needs a config.json only.")] = False,
    is_child: Annotated[bool, typer.Option("--is-child", hidden=True)] = False,
) -> None:
    """Compare PASSIVE with spinning, and print the medians and the ratios."""
    if is_child:
        print(json.dumps(_decode(model, dtype, threads, context, steps, dummy=dummy)))
        return
    command = [sys.executable, "-m", "benchmarks.openmp_wait", "--is-child", "--model", str(model), "--dtype", dtype]
    command += ["--threads", str(threads), "--context", str(context), "--steps", str(steps)]
    command += ["--dummy"] if dummy else []
    table = Table(title=f"one stream, {threads} threads{', one busy process beside it' if busy else ''}")
    for column in ("B", "ms a token, PASSIVE", "B", "B / PASSIVE", "CPU ms a token, PASSIVE", "B", "B / PASSIVE"):
        table.add_column(column, justify="right")
    with ExitStack() as at_the_end:
        if busy:
            other = at_the_end.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            at_the_end.callback(other.kill)
        for count in spin_counts.split(","):
            sides: dict[str, list[tuple[float, float]]] = {_PASSIVE: [], count: []}
            for pair in range(pairs):
                for setting in sorted(sides, key=lambda name: (name == _PASSIVE) != a_is_first(pair)):
                    sides[setting].append(_measure(command, setting))
            cells = [f"GOMP_SPINCOUNT={count}"]
            for figure in range(2):
                compared = compare(*([one[figure] for one in side] for side in sides.values()))
                cells += [f"{compared.median_a:.2f}", f"{compared.median_b:.2f}"]
                cells.append(f"{compared.ratio:.2f} ({compared.low:.2f} to {compared.high:.2f})")
            table.add_row(*cells)
    Console(width=140).print(table)


def _measure(command: list[str], setting: str) -> tuple[float, float]:
    """Run a child with PASSIVE, or with a spin count; returns the milliseconds and CPU milliseconds of a token."""
    environment = {name: value for name, value in os.environ.items() if name not in _NAMES}
    environment["OMP_WAIT_POLICY" if setting == _PASSIVE else "GOMP_SPINCOUNT"] = setting
    said = subprocess.run(
        command, env=environment, check=True, stdout=subprocess.PIPE, text=True, timeout=_RUN_TIMEOUT_S
    )
    token_ms, cpu_ms = json.loads(said.stdout.splitlines()[-1])
    return float(token_ms), float(cpu_ms)


def _decode(model: Path, dtype: str, threads: int, context: int, steps: int, *, dummy: bool) -> tuple[float, float]:
    """Decode one request; returns the median milliseconds of a step, and the processor time of one in milliseconds."""
    from actors.config import ModelConfig
    from actors.core.requests.request import EngineCoreRequest
    from actors.core.requests.sampling_params import SamplingParams
    from benchmarks.decode_step import _engine

    settings = {"model": str(model), "dtype": dtype, "device": "cpu", "load_format": "dummy" if dummy else "auto"}
    cache: dict[str, str | int] = {}
    config = ModelConfig.model_validate(settings)
    core = _engine(config, 1, context + steps + 2 * _NUM_WARM_STEPS, threads, overlap=False, cache=cache)
    params = SamplingParams(temperature=0.0, max_tokens=steps + _NUM_WARM_STEPS, ignore_eos=True)
    prompt = [3 + index % 200 for index in range(context)]
    core.submit(EngineCoreRequest(request_id="a", prompt_token_ids=prompt, sampling_params=params))
    for _ in range(_NUM_WARM_STEPS):
        core.step()
    times_ms, cpu_began_s = [], time.process_time()
    for _ in range(steps - 1):
        began_s = time.perf_counter()
        core.step()
        times_ms.append(1e3 * (time.perf_counter() - began_s))
    return statistics.median(times_ms), 1e3 * (time.process_time() - cpu_began_s) / len(times_ms)


if __name__ == "__main__":
    typer.run(run)
