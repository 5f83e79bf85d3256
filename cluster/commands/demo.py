"""`raypd demo`: start a cluster, send prompts of mixed length at once, show where each request's time went, stop."""

from __future__ import annotations

import asyncio
import inspect
import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.columns import Columns
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from cluster.api.protos.raypd.v1 import generate_pb2
from cluster.client import GenerateClient
from cluster.config import ClusterConfig
from cluster.errors import ClusterError
from cluster.routing.decision import RoutingMode
from cluster.settings.routing import RoutingConfig
from cluster.start.running import running_cluster

_NUM_LIVE = 2
_MAX_TOKENS = 80
# The demo model was trained on exercises that begin like these.
_HEADS = ("def fibonacci(n):", "class Stack:", "def read_file(path):")


@dataclass(slots=True)
class _Answer:
    """One prompt, its output so far, and the last response of its stream."""

    prompt: str
    text: str = ""
    last: generate_pb2.GenerateResponse = field(default_factory=generate_pb2.GenerateResponse)


def run_demo(config: ClusterConfig, num_requests: int, console: Console) -> None:
    """Run the demo. Raises ClusterError if a step fails; no process is left running in either case."""
    # Its table shows where the time of a handoff goes, so every request is handed over.
    config = config.model_copy(update={"routing": RoutingConfig(mode=RoutingMode.DISAGGREGATE)})
    with running_cluster(config, console) as cluster:
        assert cluster is not None, "only a signal ends a start without an address"
        answers = [_Answer(prompt) for prompt in demo_prompts(num_requests)]
        asyncio.run(_ask_all(cluster.address, answers, console))
        console.print()
        console.print(_table(answers))
    console.print(f"[green]{len(answers)} requests completed; the cluster is stopped[/]")


def demo_prompts(count: int) -> list[str]:
    """Return prompts of mixed length: a few heads of functions, then longer and longer pieces of the standard library.

    No two pieces begin alike, so that no prompt finds cached blocks: the KV of each is computed and transferred.
    """
    source = inspect.getsource(textwrap) + inspect.getsource(json)
    pieces = []
    for index in range(max(0, count - len(_HEADS))):
        start = index * 997 % len(source)
        pieces.append(source[start : start + 150 * (1 + index)])
    return [*_HEADS, *pieces][:count]


async def _ask_all(address: str, answers: Sequence[_Answer], console: Console) -> None:
    async with GenerateClient(address) as client:
        with Live(console=console, refresh_per_second=8, transient=False) as live:
            async with asyncio.TaskGroup() as tasks:
                for answer in answers:
                    tasks.create_task(_ask(client, answer, lambda: live.update(_panels(answers[:_NUM_LIVE]))))


async def _ask(client: GenerateClient, answer: _Answer, redraw: object) -> None:
    responses = client.generate(answer.prompt, max_tokens=_MAX_TOKENS, temperature=0.7, top_k=50, seed=7)
    async for response in responses:
        answer.text += response.text
        answer.last = response
        if callable(redraw):
            redraw()
    if answer.last.finish_reason == generate_pb2.FINISH_REASON_UNSPECIFIED:
        raise ClusterError(f"the stream of request {answer.last.request_id!r} ended without a finish reason")


def _panels(answers: Sequence[_Answer]) -> Columns:
    panels = [Panel(Text(answer.prompt, style="dim") + Text(answer.text), width=60, height=14) for answer in answers]
    return Columns(panels)


def _table(answers: Sequence[_Answer]) -> Table:
    table = Table(title="where the time went: tokens, milliseconds, megabytes", title_justify="left", padding=(0, 0))
    columns = (
        "#",
        "prompt",
        "output",
        "cached",
        "queued",
        "prefill",
        "KV",
        "transfer",
        "exposed",
        "TTFT",
        "TPOT",
    )
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for number, answer in enumerate(answers):
        table.add_row(str(number), *_row(answer))
    return table


def _row(answer: _Answer) -> list[str]:
    usage, timings = answer.last.usage, answer.last.timings
    has_transfer = timings.HasField("transfer")
    exposed_s = exposed_transfer_s(timings)
    return [
        str(usage.prompt_tokens),
        str(usage.output_tokens),
        str(usage.cached_tokens),
        _ms(timings.queued_s if timings.HasField("queued_s") else None),
        _ms(timings.prefill_s if timings.HasField("prefill_s") else None),
        f"{timings.transfer.kv_bytes / 1e6:.2f}" if has_transfer else "-",
        _ms(timings.transfer.transfer_s if has_transfer else None),
        _ms(exposed_s),
        _ms(timings.ttft_s if timings.HasField("ttft_s") else None),
        _ms(timings.tpot_s if timings.HasField("tpot_s") else None),
    ]


def exposed_transfer_s(timings: generate_pb2.Timings) -> float | None:
    """Return the seconds from the end of prefill to RUNNING on the decode engine; None without a handoff.

    The times are the two engines' wall clocks: between two machines, the figure includes the offset of their clocks.
    """
    prefill_ends = [
        change.at_s
        for change in timings.prefill_engine.status_changes
        if change.status == generate_pb2.REQUEST_STATUS_FINISHED_LENGTH_CAPPED
    ]
    starts = [
        change.at_s
        for change in timings.decode_engine.status_changes
        if change.status == generate_pb2.REQUEST_STATUS_RUNNING
    ]
    if not (timings.HasField("transfer") and prefill_ends and starts):
        return None
    return starts[0] - prefill_ends[0]


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f}"
