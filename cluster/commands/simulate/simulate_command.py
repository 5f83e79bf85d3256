"""The command line of `raypd simulate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cluster.commands.command_line import run
from cluster.errors import InvalidConfig

_ENGINES, _LOAD, _OUTPUT = "Engines", "Load", "Output"


def simulate(
    trace: Annotated[
        list[Path],
        typer.Option(
            help="Trace to serve: what `raypd serve --request-trace` has written, or in Mooncake's or Azure's form. "
            "Repeat the option for several traces.",
            rich_help_panel=_LOAD,
        ),
    ],
    config: Annotated[
        list[Path] | None,
        typer.Option(
            "--config", "-c", help="Settings file (YAML) of a cluster; repeat the option to compare several clusters."
        ),
    ] = None,
    cost_model: Annotated[
        Path | None, typer.Option(help="Cost model that an engine has saved.", rich_help_panel=_ENGINES)
    ] = None,
    op_tables: Annotated[
        Path | None, typer.Option(help="Directory with tables of measured operators.", rich_help_panel=_ENGINES)
    ] = None,
    shape: Annotated[
        Path | None, typer.Option(help="File with the model's shape, for --op-tables.", rich_help_panel=_ENGINES)
    ] = None,
    kv_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens that the KV cache of an engine holds; default: as --shape or the settings say.",
            rich_help_panel=_ENGINES,
        ),
    ] = None,
    link_gbit: Annotated[
        float, typer.Option(min=0.001, help="Bandwidth between two engines in Gbit/s.", rich_help_panel=_ENGINES)
    ] = 100.0,
    host_gbit: Annotated[
        float,
        typer.Option(
            min=0.001,
            help="Bandwidth between host memory and an engine's device in Gbit/s, for kv_transfer.cpu_cache_gib.",
            rich_help_panel=_ENGINES,
        ),
    ] = 200.0,
    scale_rate: Annotated[
        list[float],
        typer.Option(
            min=0.001,
            help="Factor by which requests come faster than in the trace; repeat the option for several rates.",
            rich_help_panel=_LOAD,
        ),
    ] = [1.0],  # noqa: B006  # typer copies it
    num_prompts: Annotated[
        int | None, typer.Option(min=1, help="Serve only the first requests of the trace.", rich_help_panel=_LOAD)
    ] = None,
    faults: Annotated[
        Path | None,
        typer.Option(help="File (YAML) of engines to kill, stop, slow or cut off, and when.", rich_help_panel=_LOAD),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of all random draws.", rich_help_panel=_LOAD)] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Number of simulations that run at the same time.")] = 1,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all figures to this JSON file.", rich_help_panel=_OUTPUT)
    ] = None,
    plots: Annotated[
        Path | None,
        typer.Option(
            help="Draw plots (PNG) into this directory: goodput over rate, distributions of TTFT and ITL, engines over "
            "time. Needs the extra `plan`.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
) -> None:
    """Serve a trace with simulated clusters, and show their latencies and goodput.

    The scheduler, the router and the handoffs are the code of real clusters;
    the durations of steps are predicted. The settings (slo) give the latency
    aims that goodput counts.

    Example: raypd simulate -c one.yaml -c two.yaml --trace requests.jsonl
    --cost-model step-cost.json --scale-rate 1 --scale-rate 2
    """
    from cluster.commands.simulate.simulated_config import EngineSource
    from cluster.commands.simulate.simulation_jobs import SimulationJob

    source = EngineSource(
        cost_model=cost_model,
        op_tables=op_tables,
        shape=shape,
        num_kv_tokens=kv_tokens,
        link_gbit_per_s=link_gbit,
        host_gbit_per_s=host_gbit,
    )
    files: list[Path | None] = [*config] if config else [None]
    planned = [
        SimulationJob(
            config=file,
            trace=one_trace,
            source=source,
            rate_scale=rate,
            faults=faults,
            seed=seed,
            num_requests=num_prompts,
        )
        for file in files
        for one_trace in trace
        for rate in scale_rate
    ]

    def work() -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

        from cluster.commands.simulate.simulation_jobs import SimulationFigures, check_job, run_jobs
        from cluster.commands.simulate.simulation_plots import check_plots, draw_plots
        from cluster.commands.simulate.simulation_report import document_of, render_figures

        if plots is not None:
            check_plots(plots)
        for job in planned:
            check_job(job)
        figures: dict[int, SimulationFigures] = {}
        bar = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress("simulations", *bar, console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("simulations", total=len(planned))
            for number, found in run_jobs(planned, jobs):
                figures[number] = found
                progress.advance(task)
        in_order = [figures[number] for number in range(len(planned))]
        console = Console()
        console.print(render_figures(in_order))
        if json_file is not None:
            try:
                json_file.write_text(json.dumps(document_of(in_order), indent=1))
            except OSError as error:
                raise InvalidConfig(f"--json {json_file}", [f"it cannot be written: {error.strerror}"]) from error
            console.print(f"written to {json_file}", highlight=False, soft_wrap=True)
        if plots is not None:
            for path in draw_plots(in_order, plots):
                console.print(f"drawn into {path}", highlight=False, soft_wrap=True)

    run(work)
