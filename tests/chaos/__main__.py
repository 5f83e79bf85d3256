"""`make chaos`: a run of its own, with its report."""

from __future__ import annotations

import asyncio
import signal
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cluster.config import DEMO_MODEL
from tests.chaos.answers import learn_answers
from tests.chaos.chaos_run import Chaos, chaos_cluster, check_report, possible_kinds, run_chaos
from tests.chaos.faults import FaultKind, Fleet
from tests.chaos.visits import draw_questions
from tests.checkpoints import make_checkpoint

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


@app.command()
def run(
    seed: Annotated[int, typer.Option(envvar="RAYPD_CHAOS_SEED")] = 1,
    faults: Annotated[int, typer.Option(envvar="RAYPD_CHAOS_FAULTS")] = 40,
    requests: Annotated[int, typer.Option(envvar="RAYPD_CHAOS_REQUESTS", help="At least.")] = 600,
    rate: Annotated[float, typer.Option(envvar="RAYPD_CHAOS_RATE", help="Requests per second.")] = 5.0,
    delay: Annotated[float, typer.Option(help="Mean seconds between the end of a fault and the next.")] = 1.5,
    questions: Annotated[int, typer.Option(help="Number of different questions; every request asks one of them.")] = 24,
    only: Annotated[list[FaultKind] | None, typer.Option(help="Kinds of faults; default: all.")] = None,
    prefill: Annotated[int, typer.Option(envvar="RAYPD_CHAOS_PREFILL", help="Prefill engines.")] = 2,
    decode: Annotated[int, typer.Option(envvar="RAYPD_CHAOS_DECODE", help="Decode engines.")] = 2,
    family: Annotated[str, typer.Option(help="Family of the tests' small checkpoint, such as deepseek_v3.")] = "llama",
    demo_model: Annotated[bool, typer.Option(help="Instead of a small checkpoint.")] = False,
    report_file: Annotated[Path, typer.Option(help="File for the report, as JSON.")] = Path("build/chaos.json"),
) -> None:
    """Serve under load and under fire; exit 0 if nothing was lost, changed, hung or left behind."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # So that nothing is left running.
    console = Console()
    kinds, why_not = possible_kinds()
    if why_not:
        console.print(f"without cuts: {why_not}")
    fleet = Fleet(prefill, decode)
    chaos = Chaos(seed, requests, faults, rate, delay, fleet, kinds=kinds & frozenset(only or FaultKind))
    with tempfile.TemporaryDirectory(prefix="raypd-chaos-") as directory:
        model_directory = DEMO_MODEL if demo_model else make_checkpoint(family, Path(directory) / family)
        asked = learn_answers(draw_questions(seed, questions), model_directory)
        with chaos_cluster(model_directory, Path(directory), fleet) as cluster:
            report = asyncio.run(run_chaos(chaos, asked, cluster, console.print))
            report_file.parent.mkdir(parents=True, exist_ok=True)
            report.write(report_file)
            report.show(console)
            check_report(report)
    console.print("nothing was lost, changed, hung or left behind")


if __name__ == "__main__":
    app()
