"""The command line of `raypd top`."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from cluster.commands.command_line import DEFAULT_ADDRESS, Address, Timeout, run


def top(
    address: Address = DEFAULT_ADDRESS,
    interval_s: Annotated[float, typer.Option("--interval", min=0.1, help="Seconds between two refreshes.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print the screen once, without a terminal, and end.")] = False,
    timeout_s: Timeout = 10.0,
) -> None:
    """Show a running cluster on the screen: rates, queues, KV caches, links.

    The second line names in words what holds requests back. The key ? shows
    the keys: sort, filter, drain an engine or change its role.
    """
    from rich.console import Console

    from cluster.commands.top.top_run import show_top

    shown = show_top(address, Console(), interval_s=interval_s, timeout_s=timeout_s, is_once=once)
    run(lambda: asyncio.run(shown))
