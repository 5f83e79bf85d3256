"""The bodies of the commands that change a running cluster: `raypd scale`, `drain`, `update` and the like.

Each function calls an ingress, prints what happened, and raises ClusterError if the call fails.
address: of the ingress, as host:port; timeout_s: how long each single call may take, in seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from rich.console import Console

from cluster.api.protos.raypd.v1 import admin_pb2
from cluster.client import CallFailed, GenerateClient
from cluster.commands.update_progress import UpdateProgress
from cluster.errors import NotDoneInTime

_POLL_INTERVAL_S = 0.5


async def scale(address: str, console: Console, counts: Mapping[str, int | None], *, timeout_s: float) -> None:
    """Request other numbers of engines, and print which engines the cluster keeps or starts. Raises ClusterError.

    counts: the number of engines of each role; None leaves a role's number as it is
    """
    async with GenerateClient(address) as client:
        engine_ids = await client.scale(**counts, timeout_s=timeout_s)
    console.print(f"wanted engines from now on: {', '.join(engine_ids) or 'none'}")


async def drain(
    address: str, console: Console, engine_id: str, *, for_good: bool, wait_s: float | None, timeout_s: float
) -> None:
    """Take an engine out of service once its requests are finished. Raises ClusterError.

    for_good:  do not start another engine in its place
    wait_s:    seconds to wait until the engine has left; None returns at once. Raises NotDoneInTime after them.
    """
    async with GenerateClient(address) as client:
        incarnations = await _incarnations_of(client, {engine_id}, timeout_s)
        await client.drain(engine_id, for_good=for_good, timeout_s=timeout_s)
        console.print(f"{engine_id} gets no new requests; `raypd status` shows when it has left")
        if wait_s is not None:
            await _wait_until_gone(client, incarnations, wait_s, timeout_s)
            console.print("done")


async def drain_node(address: str, console: Console, node: str, *, wait_s: float | None, timeout_s: float) -> None:
    """Take every engine and ingress on a node out of service. Raises ClusterError.

    node:   the node's address, hostname or Ray id; the wait covers its ingresses only if this is the address
    wait_s: seconds to wait until they have left; None returns at once. Raises NotDoneInTime after them.
    """
    async with GenerateClient(address) as client:
        status = await client.status(timeout_s)
        ingresses = [ingress.address for ingress in status.ingresses if ingress.node == node and ingress.address]
        engine_ids = await client.drain_node(node, timeout_s)
        incarnations = await _incarnations_of(client, engine_ids, timeout_s, state="draining") if engine_ids else set()
        drained = ", ".join((*engine_ids, *ingresses)) or "none"
        console.print(f"{node} gets no new work; engines and ingresses that drain there: {drained}")
        if wait_s is None:
            return
        # The ingress that this client is connected to may drain too, and may be the last one to leave.
        closing = [_wait_until_closed(ingress, wait_s) for ingress in ingresses]
        if incarnations:
            closing.append(_wait_until_gone(client, incarnations, wait_s, timeout_s))
        await asyncio.gather(*closing)
        console.print("done")


async def set_role(address: str, console: Console, engine_id: str, role: str, *, timeout_s: float) -> None:
    """Change an engine's role without restarting the engine. Raises ClusterError."""
    async with GenerateClient(address) as client:
        await client.set_role(engine_id, role, timeout_s)
    console.print(f"{engine_id} serves as {role}")


async def load_adapter(address: str, console: Console, name: str, directory: str, *, timeout_s: float) -> None:
    """Load a LoRA adapter, so that requests can name it. Raises ClusterError."""
    async with GenerateClient(address) as client:
        digest = await client.load_adapter(name, directory, timeout_s)
    console.print(f"{name} is loaded; its digest is {digest}")


async def unload_adapter(address: str, console: Console, name: str, *, timeout_s: float) -> None:
    """Unload a LoRA adapter: new requests that name it are refused. Raises ClusterError."""
    async with GenerateClient(address) as client:
        await client.unload_adapter(name, timeout_s)
    console.print(f"{name} is unloaded: new requests that name it are refused")


async def reset_prefix_cache(
    address: str, console: Console, engine_id: str, *, preempt: bool, timeout_s: float
) -> None:
    """Empty engines' prefix caches, and print which engines have done so. Raises ClusterError.

    engine_id: one engine; "" means all engines
    preempt:   preempt running requests first, since their blocks cannot be dropped otherwise
    """
    async with GenerateClient(address) as client:
        answers = await client.reset_prefix_cache(engine_id, preempt=preempt, timeout_s=timeout_s)
    for name, is_reset in answers.items():
        if is_reset:
            console.print(f"{name}: the prefix cache was cleared")
        else:
            console.print(f"{name} is busy, and its prefix cache was kept: requests or transfers hold blocks")


async def profile(
    address: str, console: Console, engine_id: str, duration_s: float, *, trace: Path | None, timeout_s: float
) -> None:
    """Profile an engine for duration_s seconds and print the summary. Raises ClusterError.

    trace: the file that the profiler's trace is written to; None writes none
    """
    async with GenerateClient(address) as client:
        with console.status(f"profiling {engine_id} for {duration_s:g} s"):
            timeout_s += duration_s
            answer = await client.profile(engine_id, duration_s, with_trace=trace is not None, timeout_s=timeout_s)
    console.print(answer.summary, highlight=False, markup=False, soft_wrap=True)
    if trace is not None and answer.trace:
        await asyncio.to_thread(trace.write_bytes, answer.trace)
        console.print(f"the trace is in {trace}: open it in https://ui.perfetto.dev")
    elif trace is not None:
        console.print("the trace is too large to be sent: profile for a shorter time")


async def update(address: str, console: Console, model: str, *, wait_s: float | None, timeout_s: float) -> None:
    """Replace the engines by engines that serve another checkpoint. Raises ClusterError.

    wait_s: seconds to wait until every engine is replaced; None returns at once. Raises NotDoneInTime after them.
    """
    async with GenerateClient(address) as client:
        version = await client.update(model, timeout_s)
        console.print(f"{model} is model version {version}; engines are replaced one after the other")
        if wait_s is None:
            return

        progress = UpdateProgress(version, console.print)
        what = f"the update to version {version}"
        await _wait_until(client, progress.is_done, what, wait_s, timeout_s, progress.what_is_missing)
    missing = progress.what_is_missing()
    console.print(f"done, except for engines without room to run: {missing}" if missing else "done", soft_wrap=True)


async def rotate_secret(address: str, console: Console, *, timeout_s: float) -> None:
    """Replace the cluster's secret, and print whether the older secret is refused by now. Raises ClusterError."""
    async with GenerateClient(address) as client:
        is_old_refused = await client.rotate_secret(timeout_s)
    if is_old_refused:
        console.print("every process has the new secret, and the older secret is refused")
    else:
        console.print(
            "the new secret is accepted; the older secret is accepted too until every process has the new one"
        )


async def _incarnations_of(
    client: GenerateClient, engine_ids: Collection[str], timeout_s: float, state: str = "ready"
) -> set[tuple[str, int]]:
    engines = (await client.status(timeout_s)).engines
    return {(e.engine_id, e.incarnation) for e in engines if e.engine_id in engine_ids and e.state == state}


async def _wait_until_gone(
    client: GenerateClient, incarnations: set[tuple[str, int]], wait_s: float, timeout_s: float
) -> None:
    def is_done(status: admin_pb2.GetStatusResponse) -> bool:
        there = {(e.engine_id, e.incarnation) for e in status.engines if e.state in {"ready", "draining", "drained"}}
        return not incarnations & there

    await _wait_until(client, is_done, "the drain", wait_s, timeout_s)


async def _wait_until_closed(address: str, wait_s: float) -> None:
    """Wait until nothing listens at the address: an ingress stops listening after its last request."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(wait_s):
            while True:
                try:
                    _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
                except OSError:
                    return
                writer.close()
                await asyncio.sleep(_POLL_INTERVAL_S)
    except TimeoutError:
        raise NotDoneInTime(f"the drain of the ingress at {address}", wait_s) from None


async def _wait_until(
    client: GenerateClient,
    is_done: Callable[[admin_pb2.GetStatusResponse], bool],
    what: str,
    wait_s: float,
    timeout_s: float,
    what_is_missing: Callable[[], str] = str,
) -> None:
    """Poll the cluster's status until is_done(status). Raises NotDoneInTime after wait_s seconds.

    what, what_is_missing: words for the error: what is waited for, and what of it is missing
    """
    try:
        async with asyncio.timeout(wait_s):
            while True:
                try:
                    status = await client.status(timeout_s)
                except CallFailed as error:
                    if not error.is_passing:
                        raise
                    # The ingress is being replaced at the same address; meanwhile the controller continues the change.
                    await asyncio.sleep(_POLL_INTERVAL_S)
                    continue
                # While the controller does not answer, the status does not show which engines have left.
                if not status.controller_error and is_done(status):
                    return
                await asyncio.sleep(_POLL_INTERVAL_S)
    except TimeoutError:
        raise NotDoneInTime(what, wait_s, what_is_missing()) from None
