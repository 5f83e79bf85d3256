"""Small clusters and workloads for tests of the simulation."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from actors.config import SchedulerConfig
from actors.core.requests.slo import Slo
from actors.costs.step_cost_model import StepCostModel
from actors.costs.step_shape import NUM_FEATURES
from cluster.routing.decision import RoutingMode
from cluster.routing.engine_connection import EngineRole
from cluster.settings.ingress import IngressConfig
from cluster.simulation.cluster_spec import ClusterSpec, EngineSpec, LinkSpec
from cluster.simulation.timing.step_times import ModelStepTimes
from cluster.simulation.workloads.workload_request import HASHED_TOKENS, WorkloadRequest

COSTS = StepCostModel((5e-3, 2e-5, 1e-5, 2e-5, 1e-5, 0.0, 1e-5, 1e-7, 1e-3, 1e-8, 2e-9))
"""Steps of about a small model on a small GPU."""


def constant_steps(seconds: float) -> ModelStepTimes:
    """Steps that all take as long."""
    return ModelStepTimes(StepCostModel((seconds, *[0.0] * (NUM_FEATURES - 1))))


def make_cluster(
    roles: Sequence[str],
    mode: RoutingMode = RoutingMode.COST,
    *,
    num_blocks: int = 400,
    block_size: int = HASHED_TOKENS,
    scheduler: SchedulerConfig | None = None,
    step_times: ModelStepTimes | None = None,
) -> ClusterSpec:
    """A cluster with an engine of each of these roles."""
    config = SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=2048) if scheduler is None else scheduler
    times = ModelStepTimes(COSTS) if step_times is None else step_times
    engines = tuple(
        EngineSpec(f"{role}-{number}", EngineRole(role), times, num_blocks, config, block_size)
        for number, role in enumerate(roles)
    )
    return ClusterSpec(
        engines,
        LinkSpec(bytes_per_s=1e10, latency_s=1e-4),
        kv_bytes_per_token=131_072,
        routing_mode=mode,
        slo=Slo(ttft_s=2.0, itl_s=0.1),
        ingress=IngressConfig(max_requests_in_flight=100_000, max_waiting_tokens=1 << 40),
    )


def with_ingress(spec: ClusterSpec, **settings: int) -> ClusterSpec:
    """The cluster with other settings of its ingresses."""
    return replace(spec, ingress=spec.ingress.model_copy(update=settings))


def make_workload(
    num_requests: int,
    per_s: float,
    seed: int = 1,
    *,
    max_prompt: int = 6000,
    max_output: int = 200,
    hashed: float = 0.7,
) -> Iterator[WorkloadRequest]:
    """Poisson arrivals; a part of the prompts shares one of five first blocks. hashed: that part"""
    draw, arrival_s = random.Random(seed), 0.0
    for index in range(num_requests):
        arrival_s += draw.expovariate(per_s)
        num_prompt = draw.randint(max_prompt // 50 + 1, max_prompt)
        hashes: tuple[int, ...] = ()
        if draw.random() < hashed:
            own = (1_000_000 + 1000 * index + block for block in range(1, -(-num_prompt // HASHED_TOKENS)))
            hashes = (draw.randrange(5), *own)
        yield WorkloadRequest(f"r{index}", arrival_s, num_prompt, draw.randint(1, max_output), hashes)
