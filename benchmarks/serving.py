"""How do one prefill plus one decode engine serve, beside one engine that does both, on the same cores?

Both clusters get the same open-loop Poisson load over gRPC, one after the other in the same run. 1P1D has one core for
each engine; the combined engine has both cores.

    python -m benchmarks.serving --rates 1,2,4 --requests 60
"""

from __future__ import annotations

import asyncio
import dataclasses
import platform
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.load import Load, Summary, offer, summarise
from cluster.config import ClusterConfig, load_cluster_config
from cluster.start.running import running_cluster

_COLUMNS = {
    "done": "num_completed",
    "failed": "num_failed",
    "out tok/s": "output_tokens_per_s",
    "TTFT p50": "ttft_p50",
    "p99": "ttft_p99",
    "TPOT p50": "tpot_p50",
    "p99 ": "tpot_p99",
    "ITL p50": "itl_p50",
    "p99  ": "itl_p99",
    "KV MB": "kv_mb",
    "transfer p50": "transfer_p50",
    "exposed p50": "exposed_p50",
    "p99   ": "exposed_p99",
}


def _clusters() -> dict[str, ClusterConfig]:
    shared: dict[str, Any] = {"ingress": {"port": 0}, "scheduler": {"max_num_seqs": 64, "max_num_batched_tokens": 512}}
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
    for column in ("cluster", "req/s", *_COLUMNS):
        table.add_column(column.strip(), justify="right")
    for name, config in _clusters().items():
        with running_cluster(config, console) as cluster:
            assert cluster is not None
            _offer(cluster.address, Load(2.0, 6, prompt_tokens, 8, 2000, seed=99))  # warm
            for seed, rate in enumerate((float(rate) for rate in rates.split(",")), start=1):
                summary = _offer(cluster.address, Load(rate, requests, prompt_tokens, output_tokens, 2000, seed))
                table.add_row(name, f"{rate:g}", *_cells(summary))
                console.print(f"{name} at {rate:g}/s: {summary}", soft_wrap=True)
    console.print(table)


def _offer(address: str, load: Load) -> Summary:
    return summarise(asyncio.run(offer(address, load)))


def _cells(summary: Summary) -> list[str]:
    values = dataclasses.asdict(summary)
    return [
        f"{values[field]:.1f}" if isinstance(values[field], float) else str(values[field])
        for field in _COLUMNS.values()
    ]


if __name__ == "__main__":
    typer.run(run)
