"""Does the simulator predict what raypd itself does on this machine?

For each cluster (one engine; one prefill and one decode engine; two engines without roles) raypd serves three
workloads, which `raypd bench` sends by HTTP. The first one is for fitting. The engines fit their cost models to it, and
save them in the files that `raypd simulate --cost-model` reads, which is what is simulated. Two further figures are
fitted, which the models leave out: the time between an engine's steps (scheduling, messages), by which the median gap
between tokens is longer than simulated, and the delay of clients (HTTP, tokenizing, sessions), by which the median
first token comes later. The two other workloads are predicted: the arrivals that were really sent, the cost models and
the two figures go into the simulator. A workload is sent several times, with the same prompts and arrivals, which gives
the spread of the real figures; prefix caching is off, so that no repeat finds the prompts of an earlier one.

    python -m benchmarks.simulate_beside_real --results simulate_beside_real.jsonl

A run has as many requests as come in `--seconds`, so that the whole takes about ten minutes on any machine.
Goodput counts the requests whose time to the first token and whose time per output token (TPOT: the mean of the
request's gaps, as in the goodput of vLLM's and of raypd's bench) are at most some multiples of what they are in the
idle cluster. TPOT and not the longest gap: on a machine with few cores one gap in a hundred is long for reasons that
are no part of raypd, so the longest gap of a request is such a one, whatever the cluster does.
A prediction is met if it is within 10 % (medians, goodput) or 20 % (p99) of the range of the real repeats. What is in
the file of results is not measured again. The machine should do nothing else.
"""

from __future__ import annotations

import json
import math
import socket
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import typer
import yaml
from rich.console import Console
from rich.table import Table

from actors.config import SchedulerConfig
from actors.costs.step_cost_model import StepCostModel
from benchmarks.server_runs import RAYPD, bench, percentile_s, serving
from cluster.commands.plan.plan_inputs import read_cost_model
from cluster.config import DEMO_MODEL
from cluster.routing.decision import RoutingMode
from cluster.routing.engine_connection import EngineRole
from cluster.simulation.cluster_spec import ClusterSpec, EngineSpec, LinkSpec
from cluster.simulation.simulator import simulate
from cluster.simulation.timing.step_times import ModelStepTimes
from cluster.simulation.workloads.workload_request import WorkloadRequest

CLUSTERS: Final = {"1 both": {"both": 1}, "1P1D": {"prefill": 1, "decode": 1}, "2 both": {"both": 2}}
"""Engines by role."""
LIMITS: Final = {"TTFT p50": 0.10, "ITL p50": 0.10, "goodput": 0.10, "TTFT p99": 0.20, "ITL p99": 0.20}
_NUM_BLOCKS: Final = 6000
_BLOCK_SIZE: Final = 16
_KV_BYTES_PER_TOKEN: Final = 2 * 5 * 2 * 64 * 4
"""The demo model has K and V, 5 layers, 2 heads of 64 numbers in float32."""
_MAX_MODEL_LEN: Final = 2048
_LINKS: Final = LinkSpec(bytes_per_s=1e9, latency_s=0.5e-3)
"""Shared memory of one host. Messages between engines pass two event loops."""
_LOAD: Final = 0.6
"""The rate of a workload, as a part of what the cluster finishes when all requests come at once."""
_MIN_REQUESTS: Final = 24
_BURST_REQUESTS: Final = 32
"""The requests that come at once, to find the rate."""
_SAVED_WITHIN_S: Final = 32.0
"""Engines save their models every 30 s, as far as what they learned lasts: what is simulated later is not of now."""
_TTFT_AIM, _TPOT_AIM = 5.0, 3.0
"""The aims of goodput, as multiples of what an idle cluster takes."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The lengths of a workload's requests."""

    input_len: int
    output_len: int

    @property
    def name(self) -> str:
        """The workload's name."""
        return f"{self.input_len}x{self.output_len}"


FITTED: Final = Shape(256, 64)
PREDICTED: Final = (Shape(64, 128), Shape(1024, 32))


@dataclass(frozen=True, slots=True)
class Load:
    """How a workload is offered to a cluster. rate: requests per second; aims in seconds"""

    rate: float
    ttft_aim_s: float
    tpot_aim_s: float


@dataclass(frozen=True, slots=True)
class Times:
    """The times of one request, in seconds. gaps: quantiles of its own gaps between tokens; tpot: their mean"""

    sent_s: float
    ttft_s: float
    gap_p50_s: float
    gap_p99_s: float
    tpot_s: float
    num_input_tokens: int
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Result:
    """One workload, sent once. real, predicted: figures by the names in LIMITS, in seconds and requests per second"""

    cluster: str
    workload: str
    repeat: int
    real: dict[str, float]
    predicted: dict[str, float]


def run(
    results: Annotated[Path, typer.Option(help="File of results, one JSON object a line; it is continued.")],
    only: Annotated[str, typer.Option(help="Only the cluster of this name: '1 both', '1P1D' or '2 both'.")] = "",
    repeats: Annotated[int, typer.Option(min=1, help="How often a predicted workload is sent.")] = 5,
    requests: Annotated[int, typer.Option(min=4, help="The most requests of a run.")] = 150,
    seconds: Annotated[float, typer.Option(min=1.0, help="Seconds in which the requests of a run come.")] = 12.0,
) -> None:
    """Measure and predict what the file of results lacks, and print the table."""
    console = Console(width=120)
    kept = [Result(**json.loads(line)) for line in results.read_text().splitlines()] if results.exists() else []
    for cluster in CLUSTERS:
        done = {(one.workload, one.repeat) for one in kept if one.cluster == cluster}
        missing = [(shape, index) for shape in PREDICTED for index in range(repeats) if (shape.name, index) not in done]
        if only not in ("", cluster) or not missing:
            continue
        with tempfile.TemporaryDirectory() as directory:
            port = _free_port()
            with serving(partial(command_of, Path(directory), cluster, port)) as server:
                size = RunSize(requests, seconds)
                beside = _Cluster(cluster, server.url, Path(directory), size, console)
                beside.fit()
                for shape, repeat in missing:
                    result = beside.measure(shape, repeat)
                    kept.append(result)
                    with results.open("a") as file:
                        file.write(json.dumps(asdict(result)) + "\n")
    console.print(table_of(kept))


@dataclass(frozen=True, slots=True)
class RunSize:
    """The limits of one run."""

    max_requests: int
    seconds: float

    def num_requests(self, rate: float) -> int:
        """Return how many requests a run at this rate has, in requests per second."""
        return max(_MIN_REQUESTS, min(self.max_requests, round(rate * self.seconds)))


class _Cluster:
    """A cluster that is up, and what was fitted to it."""

    def __init__(self, name: str, url: str, directory: Path, size: RunSize, console: Console) -> None:
        """directory: where its engines save their cost models."""
        self._name, self._url, self._directory = name, url, directory
        self._size, self._console = size, console
        self._loads: dict[Shape, Load] = {}
        self._models: dict[str, StepCostModel] = {}
        self._delay_s = 0.0

    def fit(self) -> None:
        """Let the engines fit their models, and fit the time between steps and the delay of clients."""
        real = times_of(self._offer(FITTED, 0))
        time.sleep(_SAVED_WITHIN_S)
        models = cost_models(self._directory, self._name)
        between_s = median_gap_s(real) - median_gap_s(predict(self._name, models, real))
        self._models = {engine: with_longer_steps(model, max(0.0, between_s)) for engine, model in models.items()}
        simulated = predict(self._name, self._models, real)
        pairs = zip(real, simulated, strict=True)
        self._delay_s = max(0.0, statistics.median(one.ttft_s - other.ttft_s for one, other in pairs))
        fitted = f"{between_s * 1e3:.2f} ms between steps, {self._delay_s * 1e3:.2f} ms to clients"
        self._console.print(f"{self._name}: {fitted}", soft_wrap=True)

    def measure(self, shape: Shape, repeat: int) -> Result:
        """Send a workload, and predict what came."""
        real = times_of(self._offer(shape, 1))
        load = self._loads[shape]
        predicted = predict(self._name, self._models, real)
        result = Result(self._name, shape.name, repeat, figures(real, load), figures(predicted, load, self._delay_s))
        self._console.print(f"{result}", soft_wrap=True)
        return result

    def _offer(self, shape: Shape, seed: int) -> dict[str, Any]:
        if shape not in self._loads:
            self._loads[shape] = self._calibrate(shape)
            self._console.print(f"{self._name}, {shape.name}: {self._loads[shape]}", soft_wrap=True)
        rate = self._loads[shape].rate
        options = ("--request-rate", str(rate))
        return bench(self._url, seed, self._size.num_requests(rate), shape.input_len, shape.output_len, *options)

    def _calibrate(self, shape: Shape) -> Load:
        lengths = (shape.input_len, shape.output_len)
        idle = bench(self._url, 2, 6, *lengths, "--max-concurrency", "1")
        burst = bench(self._url, 3, _BURST_REQUESTS, *lengths)
        aims = _TTFT_AIM * percentile_s(idle, "ttft"), _TPOT_AIM * percentile_s(idle, "tpot")
        return Load(_LOAD * float(burst["request_throughput"]), *aims)


def times_of(found: Mapping[str, Any]) -> list[Times]:
    """Return the times of a run's requests, in the order in which they were sent. Raises ValueError if one failed."""
    requests = sorted(found["requests"], key=lambda request: float(request["sent"]))
    if any(request["error"] is not None or request["itl"] is None for request in requests):
        raise ValueError("a request failed, or its gaps were not kept")
    return [
        Times(
            request["sent"] - requests[0]["sent"],
            request["ttft"],
            *_gaps(request["itl"]),
            tpot_s=request["tpot"] or 0.0,  # a single token has none
            num_input_tokens=request["input_tokens"],
            num_output_tokens=request["output_tokens"],
        )
        for request in requests
    ]


def _gaps(gaps_s: Sequence[float]) -> tuple[float, float]:
    if not gaps_s:
        return 0.0, 0.0
    p50, p99 = np.quantile(gaps_s, (0.5, 0.99))
    return float(p50), float(p99)


def cost_models(directory: Path, cluster: str) -> dict[str, StepCostModel]:
    """Return the models that a cluster's engines have saved, by one engine of each role. Raises InvalidConfig."""
    found = {}
    for role in CLUSTERS[cluster]:
        [path] = directory.glob(f"step-cost-*-{role}.json")
        found[f"{role}-0"] = read_cost_model(path)
    return found


def with_longer_steps(model: StepCostModel, seconds: float) -> StepCostModel:
    """Return a model whose steps take so much longer."""
    return replace(model, coefficients=(model.coefficients[0] + seconds, *model.coefficients[1:]))


def median_gap_s(times: Sequence[Times]) -> float:
    """Return the median, over the requests, of the median gap between a request's tokens."""
    return statistics.median(one.gap_p50_s for one in times)


def spec_of(cluster: str, models: Mapping[str, StepCostModel]) -> ClusterSpec:
    """Describe one of CLUSTERS to the simulator. models: by engine; an engine without one has that of its role"""
    engines = []
    for role, count in CLUSTERS[cluster].items():
        alike = [model for engine_id, model in models.items() if engine_id.startswith(role)]
        for number in range(count):
            model = models.get(f"{role}-{number}", alike[number % len(alike)])
            engines.append(
                EngineSpec(
                    engine_id=f"{role}-{number}",
                    role=EngineRole(role),
                    step_times=ModelStepTimes(model),
                    num_blocks=_NUM_BLOCKS,
                    scheduler=SchedulerConfig(),
                    block_size=_BLOCK_SIZE,
                    max_model_len=_MAX_MODEL_LEN,
                    step_costs=model,
                )
            )
    mode = RoutingMode(_routing_mode(cluster))
    return ClusterSpec(tuple(engines), _LINKS, _KV_BYTES_PER_TOKEN, mode)


def predict(cluster: str, models: Mapping[str, StepCostModel], real: Sequence[Times]) -> list[Times]:
    """Simulate the requests of a run, and return their times, without the clients' delay."""
    workload = [
        WorkloadRequest(f"r{index}", one.sent_s, one.num_input_tokens, one.num_output_tokens)
        for index, one in enumerate(real)
    ]
    found = simulate(spec_of(cluster, models), workload, seed=0)
    return [
        Times(
            one.arrival_s,
            one.ttft_s,
            one.itl_p50_s,
            one.itl_p99_s,
            one.tpot_s,
            one.num_prompt_tokens,
            one.num_output_tokens,
        )
        for one in found.requests
    ]


def figures(times: Sequence[Times], load: Load, delay_s: float = 0.0) -> dict[str, float]:
    """Return the figures by the names in LIMITS.

    ITL p50 and p99 are the medians, over the requests, of the quantiles of a request's own gaps. Goodput is the number
    of requests that met both aims, of TTFT and of TPOT, over the time in which they were sent.
    """
    ttft_s = [one.ttft_s + delay_s for one in times]
    num_good = sum(
        ttft <= load.ttft_aim_s and one.tpot_s <= load.tpot_aim_s for ttft, one in zip(ttft_s, times, strict=True)
    )
    span_s = times[-1].sent_s - times[0].sent_s
    return {
        "TTFT p50": statistics.median(ttft_s),
        "ITL p50": median_gap_s(times),
        "goodput": num_good / span_s if span_s > 0 else math.inf,
        "TTFT p99": float(np.quantile(ttft_s, 0.99)),
        "ITL p99": statistics.median(one.gap_p99_s for one in times),
    }


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a prediction compares with the real repeats. error: predicted / real - 1, of the medians

    spread: (largest - smallest) / median of the real repeats
    beyond: how far the prediction is outside of the range of the repeats, as a part of their median
    """

    real: float
    predicted: float
    error: float
    spread: float
    beyond: float


def judge(real: Sequence[float], predicted: Sequence[float]) -> Verdict:
    """Compare the repeats of one figure; an error is infinite if the real median is 0 and the prediction is not."""
    middle, guess = statistics.median(real), statistics.median(predicted)
    if not middle:
        error = 0.0 if guess == middle else math.inf
        return Verdict(middle, guess, error, 0.0, error)
    outside = max(0.0, min(real) - guess, guess - max(real))
    return Verdict(middle, guess, guess / middle - 1, (max(real) - min(real)) / middle, outside / middle)


def table_of(results: Sequence[Result]) -> Table:
    """Return a row for each cluster, workload and figure: medians over the repeats."""
    table = Table("cluster", "workload", "figure", "real", "spread", "predicted", "error", "met")
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.cluster, result.workload), []).append(result)
    for (cluster, workload), group in groups.items():
        for name, limit in LIMITS.items():
            verdict = judge([one.real[name] for one in group], [one.predicted[name] for one in group])
            unit, scale = ("/s", 1.0) if name == "goodput" else ("ms", 1e3)
            table.add_row(
                cluster,
                workload,
                name,
                f"{verdict.real * scale:.2f} {unit}",
                f"{verdict.spread:.0%}",
                f"{verdict.predicted * scale:.2f} {unit}",
                f"{verdict.error:+.0%}",
                "yes" if verdict.beyond <= limit else "no",
            )
    return table


def command_of(directory: Path, cluster: str, grpc_port: int, http_port: int) -> list[str]:
    """Write the settings of a cluster, and return its command."""
    groups = {role: {"count": CLUSTERS[cluster].get(role, 0), "num_cpus": 1} for role in ("prefill", "decode", "both")}
    settings = {
        **groups,
        "model": {"model": str(DEMO_MODEL), "dtype": "float32", "step_cost_directory": str(directory)},
        "cache": {"num_blocks": _NUM_BLOCKS, "block_size": _BLOCK_SIZE, "enable_prefix_caching": False},
        "routing": {"mode": _routing_mode(cluster)},
        "ingress": {"port": grpc_port, "http": {"port": http_port}},
    }
    file = directory / "cluster.yaml"
    file.write_text(yaml.safe_dump(settings))
    return [RAYPD, "serve", "--config", str(file)]


def _routing_mode(cluster: str) -> str:
    return "disaggregate" if "prefill" in CLUSTERS[cluster] else "aggregate"


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


if __name__ == "__main__":
    typer.run(run)
