"""Makes the cluster to simulate from the settings of a cluster and from what says how fast its engines are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from actors.core.requests.slo import Slo
from cluster.commands.plan.model_kv import read_model_kv
from cluster.commands.plan.plan_inputs import read_cost_model
from cluster.config import ClusterConfig
from cluster.errors import InvalidConfig
from cluster.routing.engine_connection import EngineRole
from cluster.simulation.cluster_spec import ClusterSpec, EngineSpec, LinkSpec
from cluster.simulation.faults.fault_file import FaultPlan
from cluster.simulation.timing.model_shape import read_model_shape
from cluster.simulation.timing.op_tables import read_op_tables
from cluster.simulation.timing.rank_exchange import RankLayout
from cluster.simulation.timing.step_times import ModelStepTimes, StepTimes
from cluster.simulation.workloads.workload_request import HASHED_TOKENS

_BITS: Final = 8
_MS: Final = 1000
_ROLES: Final = (EngineRole.PREFILL, EngineRole.DECODE, EngineRole.BOTH)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSource:
    """The options that say how fast an engine is and how much it holds.

    cost_model: a file that an engine has saved
    op_tables, shape: a directory of tables of operators, and the file with the model's shape
    num_kv_tokens:    tokens that an engine's KV cache holds; None: as the shape or the settings say
    link_gbit_per_s:  bandwidth between two engines
    link_latency_s:   one way
    host_gbit_per_s:  bandwidth between the host's memory and an engine's device
    """

    cost_model: Path | None = None
    op_tables: Path | None = None
    shape: Path | None = None
    num_kv_tokens: int | None = None
    link_gbit_per_s: float = 100.0
    link_latency_s: float = 1e-4
    host_gbit_per_s: float = 200.0


@dataclass(frozen=True, slots=True)
class _Engine:
    """An engine of one role. num_kv_tokens: None if the sources do not say it; state_bytes: of a request"""

    step_times: StepTimes
    num_kv_tokens: int | None
    kv_bytes_per_token: int
    state_bytes: int = 0


def cluster_of(config: ClusterConfig, source: EngineSource, plan: FaultPlan | None = None) -> ClusterSpec:
    """Return the cluster that these settings would start. Engines that encode images are left out.

    plan: what changes the age of statistics and the restarts
    Raises InvalidConfig if the sources do not say what is needed.
    """
    _refuse_bad_sources(source)
    found = {role: _engine(config, source, role) for role in _ROLES if config.group(role).count}
    engines = tuple(
        EngineSpec(
            f"{role.value}-{number}",
            role,
            engine.step_times,
            max(1, _num_kv_tokens(config, source, role, engine) // HASHED_TOKENS),
            config.engine_config(role).scheduler,
            itl_s=_seconds(config.slo.itl_ms),
            ttft_s=_seconds(config.slo.ttft_ms),
        )
        for role, engine in found.items()
        for number in range(config.group(role).count)
    )
    kept = next(iter(found.values()))
    spec = ClusterSpec(
        engines,
        LinkSpec(source.link_gbit_per_s * 1e9 / _BITS, source.link_latency_s),
        kept.kv_bytes_per_token,
        config.routing.mode,
        Slo(ttft_s=_seconds(config.slo.ttft_ms), itl_s=_seconds(config.slo.itl_ms)),
        config.ingress.count,
        host_bytes_per_s=source.host_gbit_per_s * 1e9 / _BITS,
        longest_drain_s=config.drain_timeout_s,
        restarts=config.restarts,
        ingress=config.ingress,
        kv_transfer=config.kv_transfer,
        state_bytes=kept.state_bytes,
    )
    return spec if plan is None else replace(spec, **plan.changes())  # type: ignore[arg-type]  # its fields


def _refuse_bad_sources(source: EngineSource) -> None:
    if (source.cost_model is None) == (source.op_tables is None):
        raise InvalidConfig("simulate", ["give either --cost-model, or --op-tables and --shape: how fast engines are"])
    if (source.op_tables is None) != (source.shape is None):
        raise InvalidConfig("simulate", ["--op-tables and --shape, a file with the model's shape, belong together"])


def _engine(config: ClusterConfig, source: EngineSource, role: EngineRole) -> _Engine:
    if source.cost_model is not None:
        kept, times = read_model_kv(Path(config.model.model)), ModelStepTimes(read_cost_model(source.cost_model))
        return _Engine(times, None, kept.bytes_per_token, kept.state_bytes)
    assert source.op_tables is not None, "it was checked"
    assert source.shape is not None, "it was checked"
    shape = read_model_shape(source.shape)
    tables = read_op_tables(source.op_tables, shape, RankLayout(tensor_parallel_size=config.num_ranks(role)))
    return _Engine(tables, shape.num_kv_tokens, shape.kv_bytes_per_token())


def _num_kv_tokens(config: ClusterConfig, source: EngineSource, role: EngineRole, engine: _Engine) -> int:
    cache = config.engine_config(role).cache
    if source.num_kv_tokens is not None:
        return source.num_kv_tokens
    if cache.num_blocks is not None:
        return cache.num_blocks * cache.block_size
    if engine.num_kv_tokens is not None:
        return engine.num_kv_tokens
    if cache.kv_cache_memory_gib is not None:
        return int(cache.kv_cache_memory_gib * (1 << 30) * config.num_ranks(role)) // engine.kv_bytes_per_token
    raise InvalidConfig(
        "simulate",
        [f"the KV cache of {role.value} engines has no size: give --kv-tokens, or cache.kv_cache_memory_gib"],
    )


def _seconds(aim_ms: float | None) -> float | None:
    return None if aim_ms is None else aim_ms / _MS
