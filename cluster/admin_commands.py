"""`raypd scale`, `drain` and `set-role`: changes to a running cluster."""

from __future__ import annotations

from rich.console import Console

from cluster.client import GenerateClient


async def scale(
    address: str, console: Console, *, prefill: int | None, decode: int | None, both: int | None, timeout_s: float
) -> None:
    """Ask for other numbers of engines, and say which ones are wanted then. Raises ClusterError."""
    async with GenerateClient(address) as client:
        engine_ids = await client.scale(prefill=prefill, decode=decode, both=both, timeout_s=timeout_s)
    console.print(f"wanted from now on: {', '.join(engine_ids) or 'nothing'}")


async def drain(address: str, console: Console, engine_id: str, *, for_good: bool, timeout_s: float) -> None:
    """Take an engine out of service. Raises ClusterError."""
    async with GenerateClient(address) as client:
        await client.drain(engine_id, for_good=for_good, timeout_s=timeout_s)
    console.print(f"{engine_id} gets no new requests; `raypd status` shows when it has left")


async def set_role(address: str, console: Console, engine_id: str, role: str, *, timeout_s: float) -> None:
    """Let an engine serve in another role. Raises ClusterError."""
    async with GenerateClient(address) as client:
        await client.set_role(engine_id, role, timeout_s)
    console.print(f"{engine_id} serves as {role}")
