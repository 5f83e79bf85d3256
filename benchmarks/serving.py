"""How do one prefill plus one decode engine serve, beside one engine that does both, on the same cores?

Both clusters get the same open-loop Poisson load over gRPC, one after the other in the same run, from the load
generator of `raypd bench`, with its definitions. 1P1D has one core for each engine; the combined engine has both cores.

    python -m benchmarks.serving --rates 1,2,4 --requests 60
"""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Sequence
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.grpc_sender import GrpcSender
from cluster.api.protos.raypd.v1 import generate_pb2
from cluster.bench.arrivals import Lengths, arrival_times, plan_random
from cluster.bench.estimates import percentile
from cluster.bench.load import offer_load
from cluster.bench.prompts import PromptSource, read_vocabulary
from cluster.bench.report import print_definitions
from cluster.bench.summary import Summary, summarise
from cluster.client import GenerateClient
from cluster.commands.demo import exposed_transfer_s
from cluster.config import DEMO_MODEL, ClusterConfig, load_cluster_config
from cluster.start.running import running_cluster

_METRICS: Final = ("ttft", "tpot", "itl")
_PERCENTS: Final = (50.0, 99.0)
_WARM: Final = Lengths(512, 8)


def _clusters() -> dict[str, ClusterConfig]:
    shared: dict[str, Any] = {
        "ingress": {"port": 0},
        "scheduler": {"max_num_seqs": 64, "max_num_batched_tokens": 512},
        "routing": {"mode": "disaggregate"},
    }
    return {
        "1P1D": load_cluster_config(None, shared | {"parallel": {"num_threads": 1}}),
        "1 both": load_cluster_config(
            None,
            shared
            | {"parallel": {"num_threads": 2}}
            | {"prefill": {"count": 0}, "decode": {"count": 0}, "both": {"count": 1, "num_cpus": 2}},
        ),
    }


def run(
    rates: Annotated[str, typer.Option(help="Requests per second, one or more, with commas.")] = "1,2,4",
    requests: Annotated[int, typer.Option(help="Requests at each rate.")] = 60,
    prompt_tokens: Annotated[int, typer.Option()] = 512,
    output_tokens: Annotated[int, typer.Option()] = 64,
) -> None:
    """Serve the load on both clusters and print the figures."""
    console = Console(width=180)
    table = Table(title=f"{prompt_tokens} in, {output_tokens} out; times in ms; {platform.processor() or 'cpu'}")
    for column in _columns():
        table.add_column(column, justify="right")
    for name, config in _clusters().items():
        with running_cluster(config, console) as cluster:
            assert cluster is not None
            asyncio.run(_offer(cluster.address, 2.0, 6, _WARM, seed=99))
            for seed, rate in enumerate((float(rate) for rate in rates.split(",")), start=1):
                lengths = Lengths(prompt_tokens, output_tokens)
                summary, timings = asyncio.run(_offer(cluster.address, rate, requests, lengths, seed))
                table.add_row(name, f"{rate:g}", *cells_of(summary, timings))
    console.print(table)
    print_definitions(console, _METRICS, has_goodput=False, has_pairs=False)


async def _offer(
    address: str, rate_per_s: float, num_requests: int, lengths: Lengths, seed: int
) -> tuple[Summary, Sequence[generate_pb2.Timings]]:
    """Offer a Poisson load of random tokens, so that nothing hits a prefix cache."""
    plan = plan_random(arrival_times(num_requests, rate_per_s, 1.0, seed), lengths, seed)
    async with GenerateClient(address, overload_timeout_s=0) as client:
        sender = GrpcSender(client, PromptSource(read_vocabulary(DEMO_MODEL), seed))
        result = await offer_load(plan, sender, seed=seed)
    return summarise(result, _PERCENTS, seed=seed), sender.timings


def _columns() -> list[str]:
    percentiles = [f"{metric.upper()} p{percent:g}" for metric in _METRICS for percent in _PERCENTS]
    transfers = ["KV MB", "transfer p50", "exposed p50", "exposed p99"]
    return ["cluster", "req/s", "done", "failed", "out tok/s", *percentiles, *transfers]


def cells_of(summary: Summary, timings: Sequence[generate_pb2.Timings]) -> list[str]:
    """Return the cells of a row, from "done" on. Times are in ms; NaN where there was no handoff."""
    transfers = [one.transfer for one in timings if one.HasField("transfer")]
    exposed_s = [seconds for one in timings if (seconds := exposed_transfer_s(one)) is not None]
    figures = [
        summary.output_tokens_per_s,
        *(summary.metrics[metric].percentiles[percent].value * 1e3 for metric in _METRICS for percent in _PERCENTS),
        sum(transfer.kv_bytes for transfer in transfers) / 1e6,
        percentile([transfer.transfer_s for transfer in transfers], 50) * 1e3,
        *(percentile(exposed_s, percent) * 1e3 for percent in _PERCENTS),
    ]
    return [str(summary.num_completed), str(summary.num_failed), *(f"{figure:.1f}" for figure in figures)]


if __name__ == "__main__":
    typer.run(run)
