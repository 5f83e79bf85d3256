"""The command line of `raypd plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from cluster.commands.command_line import DEFAULTS, ConfigFile, run

_SPEED, _LIMITS = "Speed of an engine", "Limits"


def plan(
    trace: Annotated[Path, typer.Option(help="Trace of the load, in raypd's, Mooncake's or Azure's form.")],
    slo: Annotated[list[str], typer.Option(help="Latency aims, such as ttft=500ms,itl=50ms.")],
    config_file: ConfigFile = None,
    model: Annotated[
        Path | None, typer.Option(help="Directory of the checkpoint, for its size.", rich_help_panel=_SPEED)
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="Name of the GPU, such as h100, for its data sheet.", rich_help_panel=_SPEED)
    ] = None,
    cost_model: Annotated[
        Path | None,
        typer.Option(help="Cost model that an engine of this model and device has saved.", rich_help_panel=_SPEED),
    ] = None,
    op_tables: Annotated[
        Path | None, typer.Option(help="Directory with tables of measured operators.", rich_help_panel=_SPEED)
    ] = None,
    shape: Annotated[
        Path | None, typer.Option(help="File with the model's shape, for --op-tables.", rich_help_panel=_SPEED)
    ] = None,
    tp: Annotated[
        int, typer.Option(min=1, help="Tensor-parallel ranks of an engine, one GPU each.", rich_help_panel=_SPEED)
    ] = 1,
    kv_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens that the KV cache of an engine holds.", rich_help_panel=_SPEED),
    ] = None,
    link_gbit: Annotated[
        float, typer.Option(min=0.001, help="Bandwidth between two engines in Gbit/s.", rich_help_panel=_SPEED)
    ] = 100.0,
    budget: Annotated[
        int | None, typer.Option(min=1, help="Limit on the number of GPUs.", rich_help_panel=_LIMITS)
    ] = None,
    attainment: Annotated[
        float,
        typer.Option(
            min=0.5, max=0.999, help="Share of the requests that has to meet the aims.", rich_help_panel=_LIMITS
        ),
    ] = DEFAULTS.planner.attainment,
    scale_rate: Annotated[
        float, typer.Option(min=0.001, help="Factor by which the load comes faster than in the trace.")
    ] = 1.0,
    num_prompts: Annotated[int | None, typer.Option(min=2, help="Read only the first requests of the trace.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of all random draws.")] = 0,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Simulate the fleets instead of using formulas; takes a minute or two.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Compute how many engines a recorded load needs, and in which roles.

    The output also has the best fleets with and without roles, the gain from
    one more engine or a faster link, and the command that prints the
    manifests.

    Example: raypd plan --model /models/Llama-3.1-8B --gpu h100
    --trace conversation.jsonl --slo ttft=500ms,itl=50ms
    """
    from cluster.commands.plan.plan_inputs import SpeedSource, gpu_of_engines
    from cluster.commands.plan.plan_report import manifests_command, render_offline_plan
    from cluster.commands.plan.plan_run import PlanOptions, make_plan

    def work() -> None:
        source = SpeedSource(model, gpu, cost_model, op_tables, shape, tp, kv_tokens, link_gbit)
        limits = (budget, attainment, scale_rate, num_prompts, seed)
        options = PlanOptions(trace, tuple(slo), config_file, source, *limits, simulates=simulate)
        made, aims, warning = make_plan(options)
        engines_gpu = gpu_of_engines(source)
        command = manifests_command(made.recommended.fleet, str(model or "MODEL"), engines_gpu, tp, config_file)
        if as_json:
            document: dict[str, Any] = {"plan": made, "command": command, "warning": warning}
            Console().print_json(msgspec.json.encode(document).decode())
        else:
            Console().print(render_offline_plan(made, aims, command, warning), soft_wrap=True)

    run(work)
