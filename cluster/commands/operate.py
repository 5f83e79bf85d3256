"""The commands of operators: `raypd status`, `scale`, `drain`, `update` and others that change a running cluster."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cluster.commands.command_line import (
    Address,
    Timeout,
    Wait,
    WaitTimeout,
    fail,
    run,
)
from cluster.errors import InvalidConfig
from cluster.routing.engine_connection import EngineRole


def status(
    address: Address = "127.0.0.1:50051",
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh the status until Ctrl-C.")] = False,
    interval_s: Annotated[float, typer.Option("--interval", min=0.1, help="Seconds between two refreshes.")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print raypd.v1.GetStatusResponse as JSON.")] = False,
    timeout_s: Timeout = 10.0,
) -> None:
    """Show a running cluster's engines, links, KV transfers, requests and the controller's decisions."""
    from cluster.commands.status_screen import show_status

    watch_s = interval_s if watch else None
    run(lambda: asyncio.run(show_status(address, Console(), watch_s=watch_s, as_json=as_json, timeout_s=timeout_s)))


def scale(
    address: Address = "127.0.0.1:50051",
    prefill: Annotated[int | None, typer.Option(min=0, help="Number of prefill engines.")] = None,
    decode: Annotated[int | None, typer.Option(min=0, help="Number of decode engines.")] = None,
    both: Annotated[int | None, typer.Option(min=0, help="Number of engines that prefill and decode.")] = None,
    encode: Annotated[int | None, typer.Option(min=0, help="Number of engines that encode images.")] = None,
    timeout_s: Timeout = 10.0,
) -> None:
    """Change the number of engines of a running cluster. Engines that leave finish their requests first."""
    from cluster.commands.administration import scale as ask

    counts = {"prefill": prefill, "decode": decode, "both": both, "encode": encode}
    run(lambda: asyncio.run(ask(address, Console(), counts, timeout_s=timeout_s)))


def drain(
    engine: Annotated[str | None, typer.Argument(help="Name of the engine, as `raypd status` shows it.")] = None,
    address: Address = "127.0.0.1:50051",
    node: Annotated[
        str | None, typer.Option(help="Drain everything on this node (address, hostname or id) instead.")
    ] = None,
    for_good: Annotated[bool, typer.Option("--for-good", help="Do not start another engine in its place.")] = False,
    wait: Wait = False,
    wait_timeout_s: WaitTimeout = 600.0,
    timeout_s: Timeout = 10.0,
) -> None:
    """Let an engine finish its requests, then restart it; or move everything off a node.

    The engine gets no new requests meanwhile.
    """
    from cluster.commands import administration as admin_commands

    wait_s = wait_timeout_s if wait else None
    if (engine is None) == (node is None):
        fail(InvalidConfig("drain", ["name an engine, or a node with --node"]), exit_code=2)
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
        typer.Option(help="Directory of the new checkpoint, in Hugging Face format, at the same path on every node."),
    ],
    address: Address = "127.0.0.1:50051",
    wait: Wait = False,
    wait_timeout_s: WaitTimeout = 600.0,
    timeout_s: Timeout = 10.0,
) -> None:
    """Replace the model without an interruption.

    Engines are replaced group by group; both checkpoints are served meanwhile.
    """
    from cluster.commands.administration import update as ask

    wait_s = wait_timeout_s if wait else None
    directory = str(model.resolve())
    run(lambda: asyncio.run(ask(address, Console(), directory, wait_s=wait_s, timeout_s=timeout_s)))


def load_adapter(
    name: Annotated[str, typer.Argument(help="Name of the adapter in requests.")],
    directory: Annotated[
        Path, typer.Argument(help="Directory of the adapter in PEFT's format, at the same path on every node.")
    ],
    address: Address = "127.0.0.1:50051",
    timeout_s: Timeout = 60.0,
) -> None:
    """Load a LoRA adapter into a running cluster, or load new weights for one."""
    from cluster.commands.administration import load_adapter as ask

    # Not resolved: what is allowed is decided where the files are read.
    run(lambda: asyncio.run(ask(address, Console(), name, str(directory.absolute()), timeout_s=timeout_s)))


def unload_adapter(
    name: Annotated[str, typer.Argument(help="Name of the adapter.")],
    address: Address = "127.0.0.1:50051",
    timeout_s: Timeout = 10.0,
) -> None:
    """Unload a LoRA adapter. Requests that use it finish with it; new requests are refused."""
    from cluster.commands.administration import unload_adapter as ask

    run(lambda: asyncio.run(ask(address, Console(), name, timeout_s=timeout_s)))


def set_role(
    engine: Annotated[str, typer.Argument(help="Name of the engine, as `raypd status` shows it.")],
    role: Annotated[EngineRole, typer.Argument(help="The engine's new role.")],
    address: Address = "127.0.0.1:50051",
    timeout_s: Timeout = 10.0,
) -> None:
    """Change the role of an engine without a restart. The engine keeps its prefix cache."""
    from cluster.commands.administration import set_role as ask

    run(lambda: asyncio.run(ask(address, Console(), engine, role.value, timeout_s=timeout_s)))


def reset_prefix_cache(
    engine: Annotated[str, typer.Argument(help="Name of the engine; default: all engines.")] = "",
    address: Address = "127.0.0.1:50051",
    preempt: Annotated[
        bool,
        typer.Option("--preempt", help="Preempt running requests, so that their blocks are forgotten, too."),
    ] = False,
    timeout_s: Timeout = 30.0,
) -> None:
    """Empty the prefix cache of one engine or all engines."""
    from cluster.commands.administration import reset_prefix_cache as ask

    run(lambda: asyncio.run(ask(address, Console(), engine, preempt=preempt, timeout_s=timeout_s)))


def profile(
    engine: Annotated[str, typer.Argument(help="Name of the engine, as `raypd status` shows it.")],
    address: Address = "127.0.0.1:50051",
    duration_s: Annotated[
        float, typer.Option("--seconds", min=0.01, max=60.0, help="Length of the profile, in seconds.")
    ] = 5.0,
    trace: Annotated[Path | None, typer.Option(help="File for the trace (.json.gz), which Perfetto shows.")] = None,
    timeout_s: Timeout = 60.0,
) -> None:
    """Profile an engine with torch's profiler, and print where its time goes. The engine is slower meanwhile."""
    from cluster.commands.administration import profile as ask

    run(lambda: asyncio.run(ask(address, Console(), engine, duration_s, trace=trace, timeout_s=timeout_s)))


def rotate_secret(address: Address = "127.0.0.1:50051", timeout_s: Timeout = 30.0) -> None:
    """Replace the secret by which engines and ingresses authenticate each other. Nothing is interrupted."""
    from cluster.commands.administration import rotate_secret as ask

    run(lambda: asyncio.run(ask(address, Console(), timeout_s=timeout_s)))
