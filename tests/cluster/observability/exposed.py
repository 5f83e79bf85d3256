"""An exposition with every metric that an ingress can have, for tests of what reads it."""

from __future__ import annotations

from typing import Final

from prometheus_client.parser import text_string_to_metric_families

from actors.core.outputs.scheduler_stats import EmbeddingStats, PrefixCacheStats, SchedulerStats, SpecDecodingStats
from actors.core.outputs.step_stats import StepStats
from actors.core.requests.adapter import AdapterStats
from actors.core.requests.structured_output import GrammarStats
from actors.costs.step_cost_model import Residuals, StepCostModel
from actors.costs.step_shape import NUM_FEATURES
from cluster.errors import Overloaded
from cluster.observability.metrics import ServingMetrics, exposition
from cluster.observability.metrics_page import declarations
from cluster.observability.routing_figures import RoutingSummary, RoutingTotals
from cluster.observability.status import (
    ClusterView,
    ControllerView,
    Decision,
    EngineView,
    IngressView,
    ModelView,
    PrefixIndexView,
    RequestTraceView,
    RequestView,
)
from cluster.planning.fleet_counts import FleetCounts
from cluster.planning.plan_record import PlanAction, PlannerMode, PlanRecord, WorkForecast
from cluster.routing.request_record import AttemptRecord, EngineTimes, RequestRecord
from kv_transfer.connector.store_steps import StoreStats
from kv_transfer.transfer_stats import TransferStats

STATS: Final = SchedulerStats(
    num_running_reqs=3,
    num_blocks=200,
    block_size=16,
    num_free_blocks=50,
    num_steps=100,
    num_replayed_steps=60,
    prefix_cache_stats=PrefixCacheStats(queries=100, hits=20, loaded=5, fetched=2),
    refused_messages={"refused request": 1},
    transfer_stats=TransferStats(num_timed_transfers=4, transfer_s=0.5, exposed_s=0.25, oldest_pin_at_s=39.0),
    store_stats=StoreStats(num_saved_blocks=9),
    embedding_stats=EmbeddingStats(num_received=41, num_failed=12, num_sent=17, num_not_sent=19),
    adapter_stats=AdapterStats(["sql", "chat"], num_waiting_reqs=2, num_loads=11, num_failed_loads=3, num_evictions=6),
    grammar_stats=GrammarStats(num_compiled=8, num_failed={"wrong": 2}, num_cached=31, compile_s=1.5),
    spec_decoding_stats=SpecDecodingStats(
        4, num_drafts=50, num_draft_tokens=90, num_accepted_tokens=63, num_accepted_tokens_per_pos=[44, 19]
    ),
    step_stats=StepStats(),
    step_costs=StepCostModel((0.01, *[0.0] * (NUM_FEATURES - 1)), (Residuals("decode", 60, median_size=0.03),)),
)
_ENGINE_TIMES: Final = EngineTimes(0.25, 0.5, transfer_s=0.75, exposed_transfer_s=0.125, num_transferred_bytes=4096)
_FAILED: Final = AttemptRecord(0.0, ("decode-0",), failure="died")
_ANSWERED: Final = AttemptRecord(0.0, ("decode-0",), num_new_tokens=5, decode=_ENGINE_TIMES)
RECORD: Final = RequestRecord("r", "", "i", 1.0, "stop", num_output_tokens=5, attempts=(_FAILED, _ANSWERED))
_PLAN: Final = PlanRecord(
    7.0,
    PlannerMode.ADVISE,
    FleetCounts(1, 1),
    FleetCounts(1, 2),
    PlanAction.CHANGE,
    "why",
    forecast=WorkForecast(last_error=0.5),
)
VIEW: Final = ClusterView(
    "demo",
    100.0,
    4,
    engines=(EngineView("decode-0", 1, "decode", "ready", stats=STATS),),
    requests=(RequestView("r1", 88.0, "decode"),),
    controller=ControllerView(
        decisions=(Decision(70.0, "start prefill-1"),),
        ingresses=(IngressView(0, 1, "ready"),),
        plan=_PLAN,
        taken_at_s=98.0,
    ),
    models=(ModelView(1, "checkpoints/demo", num_engines=2),),
    prefix_indexes=(PrefixIndexView(1, 10, 1000, 2000, 1, num_lookups=5, num_hits=2),),
)


def full_metrics() -> ServingMetrics:
    """The metrics of an ingress that has served, refused and failed requests."""
    routed = RoutingTotals((1, 0, 0, 0), 1.0, 1.0, (1,) * len(RoutingTotals().num_by_error))
    metrics = ServingMetrics(lambda: RoutingSummary(routed, routed))
    metrics.model_name, metrics.version = "demo", "0.1"
    for figures in (metrics.base, metrics.of_adapter("sql")):
        figures.on_first_tokens(1, 0.3)
        figures.on_next_tokens(4, 0.2)
        figures.on_prompt(40, 20)
        figures.on_end("stop", 1.0)
        figures.on_record(RECORD, 0.05)
    metrics.on_record(RECORD)
    metrics.on_error(Overloaded("too much", 1.0))
    metrics.on_http("/v1/models", 200)
    metrics.refused_messages.add("malformed message", "decode-0", "why")
    metrics.certificate_ends_at_s = lambda: 1.0
    metrics.request_trace = RequestTraceView
    return metrics


def full_text() -> str:
    """Every metric, in Prometheus' text format."""
    return exposition(full_metrics(), VIEW).decode()


def labels_by_sample(text: str) -> dict[str, set[str]]:
    """The labels of each sample in Prometheus' text format, without those of buckets."""
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {sample.name: set(sample.labels) - {"le"} for sample in samples}


def undeclared(text: str) -> dict[str, set[str]]:
    """The samples that are not declared, or not with these labels."""
    declared = {name: set(one.labels) for one in declarations() for name in one.names}
    return {name: labels for name, labels in labels_by_sample(text).items() if declared.get(name) != labels}
