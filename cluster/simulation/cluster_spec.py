"""Describes a cluster to simulate: its engines, links, ingresses, and how old its statistics are. Values only."""

from __future__ import annotations

from dataclasses import dataclass, field

from actors.config import SchedulerConfig
from actors.core.requests.slo import Slo
from actors.costs.step_cost_model import StepCostModel
from cluster.routing.decision import RoutingMode
from cluster.routing.engine_connection import EngineRole
from cluster.settings.ingress import IngressConfig
from cluster.settings.restarts import RestartConfig
from cluster.simulation.timing.step_times import StepTimes
from cluster.simulation.workloads.workload_request import HASHED_TOKENS
from kv_transfer.config import KVTransferConfig


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One engine.

    engine_id:     as in a cluster: a role and a number, such as "prefill-0"
    step_times:    how long its steps take
    num_blocks:    blocks of its KV cache
    block_size:    tokens of a block. With HASHED_TOKENS the hashes of the workload are those of the blocks; other sizes
                   are for workloads without hashes
    max_model_len: the most tokens of a request
    step_costs:    the cost model that the engine reports to routers; None: one fitted to step_times
    itl_s, ttft_s: the inter-token latency and the time to the first token at which its steps aim; None: no aim
    start_s:       when it begins to serve
    """

    engine_id: str
    role: EngineRole
    step_times: StepTimes
    num_blocks: int
    scheduler: SchedulerConfig
    block_size: int = HASHED_TOKENS
    max_model_len: int = 1 << 20
    step_costs: StepCostModel | None = None
    itl_s: float | None = None
    ttft_s: float | None = None
    start_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """The links between engines.

    bytes_per_s: of an engine's network interface, in each direction; transfers that use it at once share it equally
    latency_s:   one way, of control messages and of the first byte of a transfer
    """

    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """A cluster.

    links:              the links between all engines
    kv_bytes_per_token: bytes of one token's KV
    state_bytes:        bytes of a request's recurrent state, which travel behind its last block; in the cache they take
                        no room here
    routing_mode:       how routes are chosen
    slo:                the aims of requests that have none of their own
    num_ingresses:      clients spread their requests over so many
    stats_interval_s:   an engine reports its load each time so many seconds have passed
    stats_delay_s:      reports are so old when they come
    restart_s:          a killed engine serves again after so many seconds; None: never
    death_noticed_s:    ingresses and peers notice after so many seconds that an engine has died
    start_s:            an engine that is started later serves after so many seconds
    longest_drain_s:    an engine that drains ends after so many seconds, even if it still has requests
    look_s:             the controller looks so often whether an engine that drains is idle
    restarts:           the limits of restarts of engines that die
    load_window_s:      ingresses count what clients ask for, in windows of so many seconds, for a planner; None: they
                        do not
    host_bytes_per_s:   bandwidth with which an engine's blocks come back from the host's memory, where
                        kv_transfer.cpu_cache_gib keeps some; of PCIe 4.0 with 16 lanes by default
    ingress:            the limits of each ingress, on what waits and on how often a request is submitted
    kv_transfer:        the handoffs' deadlines and limits
    """

    engines: tuple[EngineSpec, ...]
    links: LinkSpec
    kv_bytes_per_token: int
    routing_mode: RoutingMode
    slo: Slo = field(default_factory=Slo)
    num_ingresses: int = 1
    stats_interval_s: float = 0.5
    stats_delay_s: float = 0.0
    restart_s: float | None = None
    death_noticed_s: float = 1.0
    start_s: float = 60.0
    longest_drain_s: float = 30.0
    look_s: float = 1.0
    restarts: RestartConfig = field(default_factory=RestartConfig)
    load_window_s: float | None = None
    host_bytes_per_s: float = 25e9
    state_bytes: int = 0
    ingress: IngressConfig = field(default_factory=IngressConfig)
    kv_transfer: KVTransferConfig = field(default_factory=KVTransferConfig)
