"""How long does a stream pause when its decode engine is killed, and how soon is the engine replaced?

1P+1D with the demo model, on the CPU. Streams decode, the decode engine's process gets a SIGKILL, and every stream goes
on wherever it can (with a single decode engine: on the prefill engine). A pause is the longest time between two
responses of a stream from the kill on; streams that had ended by then do not count. Replaced means: the next
incarnation of the engine was seen ready in GetStatus. Each answer is compared with the one that was given before any
fault.

Restarts do not back off here: an engine that dies for the first time in ten minutes is started again at once.

    python -m benchmarks.recovery --kills 12
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Final

import numpy as np
import psutil
import typer
from rich.console import Console
from rich.table import Table

from cluster.api.protos.raypd.v1 import admin_pb2
from cluster.client import GenerateClient
from cluster.config import load_cluster_config
from cluster.start.running import running_cluster

_VICTIM: Final = "decode-0"
_TOKENS_BEFORE_THE_KILL: Final = 20
_POLL_INTERVAL_S: Final = 0.05
_TIMEOUT_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class Load:
    """The requests that run when the engine is killed."""

    num_streams: int
    num_prompt_tokens: int
    num_output_tokens: int


@dataclass(slots=True)
class Kill:
    """The consequences of one kill. Times are seconds from the kill on.

    pauses_s:    of each stream
    ready_s:     when the next incarnation was ready
    decisions:   of the controller, about this engine
    num_changed: answers that were not what they had been without a fault
    """

    pauses_s: list[float] = field(default_factory=list)
    ready_s: float = 0.0
    decisions: list[tuple[float, str]] = field(default_factory=list)
    num_changed: int = 0


@dataclass(slots=True)
class _Stream:
    """One stream as its client sees it. Times are monotonic seconds."""

    token_ids: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    is_well_under_way: asyncio.Event = field(default_factory=asyncio.Event)

    async def read(self, client: GenerateClient, prompt: Sequence[int], num_tokens: int) -> None:
        async for response in client.generate(prompt, max_tokens=num_tokens, temperature=0.0, ignore_eos=True):
            assert response.first_position == len(self.token_ids), "a token was lost, or came twice"
            self.token_ids.extend(response.token_ids)
            self.times_s.append(time.monotonic())
            if len(self.token_ids) >= _TOKENS_BEFORE_THE_KILL:
                self.is_well_under_way.set()

    def pause_s(self, since_s: float) -> float:
        """The longest time between two responses of which the later one came after since_s; 0 if none did."""
        gaps = zip(self.times_s, self.times_s[1:], strict=False)
        return max((later_s - max(since_s, s) for s, later_s in gaps if later_s > since_s), default=0.0)


def run(
    kills: Annotated[int, typer.Option(help="One after the other.")] = 12,
    streams: Annotated[int, typer.Option(help="At once.")] = 8,
    prompt_tokens: Annotated[int, typer.Option()] = 256,
    output_tokens: Annotated[int, typer.Option()] = 200,
) -> None:
    """Kill and measure."""
    console = Console(width=160)
    restarts = {"first_backoff_s": 0.0, "max_deaths": 1000}
    settings = {"ingress": {"port": 0}, "parallel": {"num_threads": 1}, "restarts": restarts}
    with running_cluster(load_cluster_config(None, settings), console) as cluster:
        assert cluster is not None
        load = Load(streams, prompt_tokens, output_tokens)
        done = asyncio.run(_kill_again_and_again(cluster.address, load, kills, console.print))
    console.print(_table(done))
    for seconds, text in done[-1].decisions:
        console.print(f"{seconds:8.2f} s  {text}", highlight=False)


async def _kill_again_and_again(address: str, load: Load, num_kills: int, say: Callable[[str], None]) -> list[Kill]:
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 2000) for _ in range(load.num_prompt_tokens)] for _ in range(load.num_streams)]
    async with GenerateClient(address) as client:
        undisturbed = await _ask(client, prompts, load.num_output_tokens, asyncio.Event())
        expected = [stream.token_ids for stream in undisturbed]
        kills = []
        for number in range(num_kills):
            kill = await _kill_once(client, prompts, expected)
            say(f"kill {number + 1}: longest pause {max(kill.pauses_s):.2f} s, ready after {kill.ready_s:.2f} s")
            kills.append(kill)
        return kills


async def _kill_once(client: GenerateClient, prompts: Sequence[Sequence[int]], expected: list[list[int]]) -> Kill:
    engine = _engine(await client.status())
    process = _process_at(engine.address)
    are_all_under_way, kill = asyncio.Event(), Kill()
    asking = asyncio.create_task(_ask(client, prompts, len(expected[0]), are_all_under_way))
    async with asyncio.timeout(_TIMEOUT_S):
        await are_all_under_way.wait()
        killed_s, killed_at_s = time.monotonic(), time.time()
        process.kill()
        streams = await asking
        status = await _until_ready(client, engine.incarnation + 1)
    kill.ready_s = time.monotonic() - killed_s
    kill.pauses_s = [pause_s for stream in streams if (pause_s := stream.pause_s(killed_s))]
    kill.num_changed = sum(stream.token_ids != token_ids for stream, token_ids in zip(streams, expected, strict=True))
    age_s = time.time() - killed_at_s
    kill.decisions = [
        (age_s - decision.age_seconds, decision.text)
        for decision in status.decisions
        if _VICTIM in decision.text and decision.age_seconds < age_s
    ]
    return kill


async def _ask(
    client: GenerateClient, prompts: Sequence[Sequence[int]], num_tokens: int, are_under_way: asyncio.Event
) -> list[_Stream]:
    streams = [_Stream() for _ in prompts]
    async with asyncio.TaskGroup() as tasks:
        for stream, prompt in zip(streams, prompts, strict=True):
            tasks.create_task(stream.read(client, prompt, num_tokens))
        for stream in streams:
            await stream.is_well_under_way.wait()
        are_under_way.set()
    return streams


async def _until_ready(client: GenerateClient, incarnation: int) -> admin_pb2.GetStatusResponse:
    while True:
        status: admin_pb2.GetStatusResponse = await client.status()
        engine = _engine(status)
        if engine.incarnation >= incarnation and engine.state == "ready":
            return status
        await asyncio.sleep(_POLL_INTERVAL_S)


def _engine(status: admin_pb2.GetStatusResponse) -> admin_pb2.EngineStatus:
    return next(engine for engine in status.engines if engine.engine_id == _VICTIM)


def _process_at(address: str) -> psutil.Process:
    port = int(address.rpartition(":")[2])
    for process in psutil.Process().children(recursive=True):
        if any(c.laddr.port == port and c.status == psutil.CONN_LISTEN for c in process.net_connections("tcp")):
            return process
    raise LookupError(f"no process of ours listens at {address}")


def _table(kills: Sequence[Kill]) -> Table:
    table = Table(title=f"{len(kills)} kills of {_VICTIM}; seconds")
    for column in ("what", "count", "p50", "p99", "max"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for what, values in (
        ("pause of a stream", [pause_s for kill in kills for pause_s in kill.pauses_s]),
        ("until the next incarnation is ready", [kill.ready_s for kill in kills]),
    ):
        quantiles = (*np.percentile(values, (50, 99)), max(values))
        table.add_row(what, str(len(values)), *(f"{value:.2f}" for value in quantiles))
    table.add_row("answers that changed", str(sum(kill.num_changed for kill in kills)))
    return table


if __name__ == "__main__":
    typer.run(run)
