"""The commands of operators: `raypd status`, `scale`, `drain`, `update` and others that change a running cluster."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cluster.commands.command_line import DEFAULT_ADDRESS, Address, Timeout, Wait, WaitTimeout, fail, run
from cluster.errors import InvalidConfig
from cluster.routing.engine_connection import EngineRole


def status(
    address: Address = DEFAULT_ADDRESS,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Refresh the status on the screen until Ctrl-C.")
    ] = False,
    interval_s: Annotated[
        float, typer.Option("--interval", min=0.1, help="Seconds between two refreshes of --watch.")
    ] = 1.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the status once as JSON (message raypd.v1.GetStatusResponse).")
    ] = False,
    cost: Annotated[
        bool, typer.Option("--cost", help="Show instead how long each engine predicts its steps to take.")
    ] = False,
    timeout_s: Timeout = 10.0,
) -> None:
    """Show the engines, ingresses, KV transfers and requests of a running cluster.

    The last decisions of the controller are at the end.
    """
    from cluster.commands.status.status_screen import show_status

    watch_s = interval_s if watch else None
    shown = show_status(address, Console(), watch_s=watch_s, as_json=as_json, timeout_s=timeout_s, with_costs=cost)
    run(lambda: asyncio.run(shown))


def explain(
    request_id: Annotated[
        str,
        typer.Argument(
            help="Id of a request that is in flight or has ended lately, as its answer names it, or so much of its "
            "beginning that no other request has it; its tenant and a slash may stand before it. Default: the last "
            "requests."
        ),
    ] = "",
    address: Address = DEFAULT_ADDRESS,
    last: Annotated[int, typer.Option(min=1, max=500, help="Number of the last requests, if no id is given.")] = 20,
    tenant: Annotated[
        str | None,
        typer.Option(help="Tenant whose request it is, for operators; default: your own, or any for an operator."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print records and phases as JSON (docs/routing.md).")
    ] = False,
    perfetto: Annotated[
        Path | None, typer.Option(help="Write the requests to this file as a trace for ui.perfetto.dev.")
    ] = None,
    timeout_s: Timeout = 10.0,
) -> None:
    """Show where the time of a request went, and why it went to its engines.

    The output has the phases of the request on a time axis, the cause of its
    latency, and for each attempt the predicted cost of every way to serve the
    request beside the measured one. Without an id, the command lists the last
    requests. Any ingress can be asked.

    Example: raypd explain chatcmpl-3f2a
    """
    from cluster.commands.status.explanation import Asked, show_explanation

    asked = Asked(request_id, last, tenant, as_json, perfetto)
    run(lambda: asyncio.run(show_explanation(address, Console(), asked, timeout_s=timeout_s)))


def scale(
    address: Address = DEFAULT_ADDRESS,
    prefill: Annotated[int | None, typer.Option(min=0, help="New number of prefill engines.")] = None,
    decode: Annotated[int | None, typer.Option(min=0, help="New number of decode engines.")] = None,
    both: Annotated[int | None, typer.Option(min=0, help="New number of engines that prefill and decode.")] = None,
    encode: Annotated[int | None, typer.Option(min=0, help="New number of engines that encode images.")] = None,
    timeout_s: Timeout = 10.0,
) -> None:
    """Change the number of engines of a running cluster.

    A role without an option keeps its number of engines. Engines that leave
    finish their requests first.

    Example: raypd scale --prefill 2 --decode 4
    """
    from cluster.commands.administration import scale as ask

    counts = {"prefill": prefill, "decode": decode, "both": both, "encode": encode}
    run(lambda: asyncio.run(ask(address, Console(), counts, timeout_s=timeout_s)))


def drain(
    engine: Annotated[str | None, typer.Argument(help="Name of the engine, as `raypd status` shows it.")] = None,
    address: Address = DEFAULT_ADDRESS,
    node: Annotated[
        str | None,
        typer.Option(
            help="Drain all engines and ingresses of this node instead; the node's address, hostname or Ray id."
        ),
    ] = None,
    for_good: Annotated[
        bool, typer.Option("--for-good", help="Do not start another engine in place of the drained one.")
    ] = False,
    wait: Wait = False,
    wait_timeout_s: WaitTimeout = 600.0,
    timeout_s: Timeout = 10.0,
) -> None:
    """Drain an engine, or all engines and ingresses of a node.

    A drained engine gets no new requests, finishes the ones that it has, and is
    then replaced by a new process, unless --for-good is given. On a drained
    node nothing is started any more; its engines are started again on other
    nodes.

    Example: raypd drain --node 10.0.0.7 --wait
    """
    from cluster.commands import administration as admin_commands

    wait_s = wait_timeout_s if wait else None
    if (engine is None) == (node is None):
        fail(InvalidConfig("drain", ["name either an engine or, with --node, a node"]), exit_code=2)
    if engine is not None:
        draining = admin_commands.drain(
            address, Console(), engine, for_good=for_good, wait_s=wait_s, timeout_s=timeout_s
        )
    else:
        assert node is not None
        draining = admin_commands.drain_node(address, Console(), node, wait_s=wait_s, timeout_s=timeout_s)
    run(lambda: asyncio.run(draining))


def update(
    model: Annotated[
        Path,
        typer.Option(
            help="Directory of the new checkpoint, in Hugging Face format; it has to be at this path on every node."
        ),
    ],
    address: Address = DEFAULT_ADDRESS,
    wait: Wait = False,
    wait_timeout_s: WaitTimeout = 600.0,
    timeout_s: Timeout = 10.0,
) -> None:
    """Update a running cluster to another checkpoint, without interrupting requests.

    Engines are replaced one after the other, and requests finish on the
    checkpoint on which they began.

    Example: raypd update --model /models/Llama-3.1-8B-v2 --wait
    """
    from cluster.commands.administration import update as ask

    wait_s = wait_timeout_s if wait else None
    directory = str(model.resolve())
    run(lambda: asyncio.run(ask(address, Console(), directory, wait_s=wait_s, timeout_s=timeout_s)))


def load_adapter(
    name: Annotated[str, typer.Argument(help="Name by which requests use the adapter.")],
    directory: Annotated[
        Path, typer.Argument(help="Directory of the adapter in PEFT format; it has to be at this path on every node.")
    ],
    address: Address = DEFAULT_ADDRESS,
    timeout_s: Timeout = 60.0,
) -> None:
    """Load a LoRA adapter, or new weights for a loaded one, into a running cluster.

    Example: raypd load-adapter sql /models/adapters/sql
    """
    from cluster.commands.administration import load_adapter as ask

    # Symbolic links are not resolved: each engine checks the path on its own node.
    run(lambda: asyncio.run(ask(address, Console(), name, str(directory.absolute()), timeout_s=timeout_s)))


def unload_adapter(
    name: Annotated[str, typer.Argument(help="Name of the adapter.")],
    address: Address = DEFAULT_ADDRESS,
    timeout_s: Timeout = 10.0,
) -> None:
    """Unload a LoRA adapter.

    Requests that use the adapter finish with it; new requests that name it are
    refused.
    """
    from cluster.commands.administration import unload_adapter as ask

    run(lambda: asyncio.run(ask(address, Console(), name, timeout_s=timeout_s)))


def set_role(
    engine: Annotated[str, typer.Argument(help="Name of the engine, as `raypd status` shows it.")],
    role: Annotated[EngineRole, typer.Argument(help="The engine's new role.")],
    address: Address = DEFAULT_ADDRESS,
    timeout_s: Timeout = 10.0,
) -> None:
    """Change the role of an engine without restarting it.

    The engine keeps its prefix cache.

    Example: raypd set-role decode-1 both
    """
    from cluster.commands.administration import set_role as ask

    run(lambda: asyncio.run(ask(address, Console(), engine, role.value, timeout_s=timeout_s)))


def reset_prefix_cache(
    engine: Annotated[
        str, typer.Argument(help="Name of the engine, as `raypd status` shows it; default: all engines.")
    ] = "",
    address: Address = DEFAULT_ADDRESS,
    preempt: Annotated[
        bool,
        typer.Option(
            "--preempt",
            help="Preempt running requests first; they compute their KV again later. Without this option, a "
            "busy engine keeps its cache.",
        ),
    ] = False,
    timeout_s: Timeout = 30.0,
) -> None:
    """Empty the prefix cache of one engine or of all engines."""
    from cluster.commands.administration import reset_prefix_cache as ask

    run(lambda: asyncio.run(ask(address, Console(), engine, preempt=preempt, timeout_s=timeout_s)))


def profile(
    engine: Annotated[str, typer.Argument(help="Name of the engine, as `raypd status` shows it.")],
    address: Address = DEFAULT_ADDRESS,
    duration_s: Annotated[
        float, typer.Option("--seconds", min=0.01, max=60.0, help="Duration of the profile in seconds.")
    ] = 5.0,
    trace: Annotated[
        Path | None, typer.Option(help="Write the trace to this file (.json.gz), which ui.perfetto.dev can open.")
    ] = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0.1, help="Seconds to wait for the answer after the profile has ended.")
    ] = 60.0,
) -> None:
    """Profile an engine with torch's profiler, and print a summary of its time.

    The engine is slower while the profiler runs.

    Example: raypd profile prefill-0 --seconds 10 --trace prefill-0.json.gz
    """
    from cluster.commands.administration import profile as ask

    run(lambda: asyncio.run(ask(address, Console(), engine, duration_s, trace=trace, timeout_s=timeout_s)))


def rotate_secret(address: Address = DEFAULT_ADDRESS, timeout_s: Timeout = 30.0) -> None:
    """Replace the secret with which engines and ingresses authenticate each other.

    No request is interrupted. Every process accepts the old secret as well
    until all processes have the new one.
    """
    from cluster.commands.administration import rotate_secret as ask

    run(lambda: asyncio.run(ask(address, Console(), timeout_s=timeout_s)))
