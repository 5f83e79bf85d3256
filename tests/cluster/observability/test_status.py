"""The status as an operator is shown it.

Tests of cluster/api/grpc/conversions/status_messages.py, cluster/commands/status/status_screen.py,
cluster/commands/status/cost_tables.py, cluster/commands/status/wide_table.py.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from actors.core.outputs.engine_core_outputs import EndCause
from actors.core.outputs.scheduler_stats import EmbeddingStats, PrefixCacheStats, SchedulerStats, SpecDecodingStats
from actors.core.requests.adapter import AdapterStats
from actors.costs.step_cost_model import CostOrigin, Residuals, StepCostModel
from actors.costs.step_shape import NUM_FEATURES
from cluster.api.grpc.conversions.status_messages import status_to_proto
from cluster.api.protos.raypd.v1 import admin_pb2
from cluster.client import GenerateClient
from cluster.commands.status.cost_tables import render_costs
from cluster.commands.status.status_screen import render_status
from cluster.observability.metrics import ServingMetrics, exposition
from cluster.observability.status import (
    ClusterView,
    ControllerView,
    Decision,
    EngineView,
    IngressView,
    ModelView,
    RequestTraceView,
    RequestView,
    merge_engines,
)
from cluster.routing.engine_connection import EngineDescriptor, EngineRole
from cluster.routing.pairing import RefusedPair
from kv_transfer.connector.store_steps import StoreStats
from kv_transfer.params import TransferRole
from kv_transfer.transfer_stats import LinkState, LinkStats, TransferStats
from tests.cluster.serving_setup import HELLO, make_ingress_server, make_pair

NOW_S = 5000.0
LINK = LinkStats("decode-0", 3, TransferRole.PRODUCER, LinkState.DEAD, 1, 2**20, NOW_S - 90, NOW_S - 4, "cut")
TRANSFERS = TransferStats(
    num_sent_bytes=3 * 2**30,
    num_transfers_completed=7,
    num_stalls=2,
    num_timed_transfers=4,
    transfer_s=0.4,
    exposed_s=0.02,
    num_active_transfers=1,
    num_pinned_blocks=12,
    oldest_pin_at_s=NOW_S - 61,
    links=(LINK,),
    dropped_messages={"another attempt": 5},
)
STATS = SchedulerStats(
    num_running_reqs=3,
    num_blocks=200,
    num_free_blocks=50,
    prefix_cache_stats=PrefixCacheStats(queries=100, hits=20, loaded=5),
    transfer_stats=TRANSFERS,
    store_stats=StoreStats(num_saved_blocks=9),
    embedding_stats=EmbeddingStats(num_received=41, num_failed=12, num_sent=17, num_not_sent=19),
    adapter_stats=AdapterStats(["sql", "chat"], num_waiting_reqs=2, num_loads=11, num_failed_loads=3, num_evictions=6),
    spec_decoding_stats=SpecDecodingStats(
        4, num_drafts=50, num_draft_tokens=90, num_accepted_tokens=63, num_accepted_tokens_per_pos=[44, 19]
    ),
)
VIEW = ClusterView(
    model="demo",
    now_s=NOW_S,
    membership_version=4,
    engines=(
        EngineView(
            "prefill-0",
            2,
            "prefill",
            "ready",
            "host:1",
            "out of memory",
            "tcp",
            "cafe0123",
            stats=STATS,
            stats_at_s=NOW_S - 0.5,
        ),
        EngineView("prefill-1", 1, "prefill", "starting", model_version=2),
    ),
    requests=(RequestView("r1", NOW_S - 12, "decode", "prefill-0", "decode-0", 40, 5, 2, num_migrations=1),),
    controller=ControllerView(decisions=(Decision(NOW_S - 30, "start prefill-1, incarnation 1: its slot is empty"),)),
    models=(
        ModelView(1, "checkpoints/old", num_engines=2, num_requests=1),
        ModelView(2, "checkpoints/new", last_error="no tokenizer can be loaded"),
    ),
    refused_pairs=(RefusedPair("prefill-0", "decode-1", "dtype: 'float32' at prefill-0, 'bfloat16' at decode-1"),),
    num_migrations=3,
)


def rendered(view: ClusterView, width: int = 250) -> str:
    console = Console(file=StringIO(), width=width, color_system=None)
    console.print(render_status(status_to_proto(view)))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_an_update_that_is_held_up_says_by_what() -> None:
    said = "1 of 3 engines serve model version 2; the others stay as they are until this is solved: decode-1 (no room)"
    view = replace(VIEW, controller=ControllerView(update=said))
    assert f"update: {said}\n" in rendered(view)
    assert "update:" not in rendered(VIEW)


def test_what_an_engine_computes_with_is_shown_with_the_reason() -> None:
    attention, linears, threads = "vllm_cpu: not installed", "plain: no oneDNN", "2 threads on cores 0, 1"
    one, *others = VIEW.engines
    one = replace(
        one, attention_backend="torch", attention_reason=attention, linear_layers=linears, cpu_threads=threads
    )
    shown = rendered(replace(VIEW, engines=(one, *others)))
    for words in ("attention over the KV cache", attention, "linear layers", linears, "threads", threads):
        assert words in shown
    assert "linear layers" not in rendered(VIEW), "engines that have not said it yet"


def test_the_inputs_that_an_engine_does_not_serve_are_shown() -> None:
    one, *others = VIEW.engines
    shown = rendered(replace(VIEW, engines=(replace(one, left_out_inputs="images and sound"), *others)))
    [row] = [line for line in shown.splitlines() if "images and sound" in line]
    assert one.engine_id in row
    assert "inputs that are not served" in shown
    assert "not served" not in rendered(VIEW)


def test_the_cuda_graphs_of_an_engine_are_shown_with_the_steps_that_they_computed() -> None:
    one, *others = VIEW.engines
    assert one.stats is not None
    stats = replace(one.stats, num_steps=1234, num_replayed_steps=1000)
    one = replace(one, cuda_graphs="for 1, 2 requests, 35 MiB, 4.1 s; all sizes are captured", stats=stats)
    shown = rendered(replace(VIEW, engines=(one, *others)))
    [row] = [line for line in shown.splitlines() if one.cuda_graphs in line]
    assert [word for word in row.replace("│", " ").split() if word.isdigit()][-2:] == ["1000", "234"]
    assert "CUDA graphs" not in rendered(VIEW), "engines that have not said it yet"


def test_lines_that_a_request_trace_lacks_are_said_with_the_reason() -> None:
    trace = RequestTraceView(num_lines=10, num_dropped_lines=7, error="No space left on device")
    ingress = IngressView(2, 1, "ready", "127.0.0.1:50051", request_trace=trace)
    view = replace(VIEW, controller=ControllerView(ingresses=(ingress,)))
    assert "ingress 2: the request trace lacks 7 lines: No space left on device\n" in rendered(view)
    message = status_to_proto(view).ingresses[0].request_trace
    assert (message.lines, message.dropped_lines, message.error) == (10, 7, "No space left on device")
    assert "request trace" not in rendered(VIEW)


def test_the_lines_of_a_request_trace_are_counted_in_the_metrics() -> None:
    metrics = ServingMetrics()
    assert b"raypd_request_trace_lines" not in exposition(metrics, VIEW)
    metrics.request_trace = lambda: RequestTraceView(num_lines=10, num_dropped_lines=7)
    shown = exposition(metrics, VIEW)
    assert b'raypd_request_trace_lines_total{result="written"} 10.0' in shown
    assert b'raypd_request_trace_lines_total{result="dropped"} 7.0' in shown


def test_an_ingress_whose_event_loop_is_busy_says_for_how_long() -> None:
    ingress = IngressView(0, 1, "busy", "127.0.0.1:50051", busy_s=12.3)
    view = replace(VIEW, controller=ControllerView(ingresses=(ingress,)))
    assert status_to_proto(view).ingresses[0].busy_seconds == pytest.approx(12.3)
    assert "busy for 12 s" in rendered(view)


def test_every_number_has_its_place() -> None:
    status = status_to_proto(VIEW)
    engine = status.engines[0]
    assert (engine.load.running, engine.load.free_blocks, engine.age_seconds) == (3, 50, 0.5)
    assert engine.transfers.mean_transfer_seconds == pytest.approx(0.1)
    assert engine.transfers.mean_exposed_seconds == pytest.approx(0.005)
    assert engine.transfers.oldest_pin_seconds == 61
    assert engine.transfers.dropped_messages == {"another attempt": 5}
    assert (engine.links[0].state, engine.links[0].idle_seconds, engine.links[0].end) == ("dead", 4, "producer")
    assert engine.stores.saved_blocks == 9
    assert (engine.spec_decoding.drafts, engine.spec_decoding.draft_tokens, engine.spec_decoding.accepted_tokens) == (
        50,
        90,
        63,
    )
    assert list(engine.spec_decoding.accepted_tokens_per_pos) == [44, 19]
    images = engine.embeddings
    assert (images.received, images.failed, images.sent, images.not_sent) == (41, 12, 17, 19)
    adapters = engine.adapters
    assert (list(adapters.loaded), adapters.waiting, adapters.loads) == (["sql", "chat"], 2, 11)
    assert (adapters.failed_loads, adapters.evictions) == (3, 6)
    assert not status.engines[1].HasField("load")
    assert status.requests[0].age_seconds == 12
    assert (status.requests[0].migrations, status.migrations) == (1, 3)
    assert status.decisions[0].age_seconds == 30


def test_tables_show_all_of_it() -> None:
    text = rendered(VIEW)
    for word in (
        "prefill-0",
        "tcp",
        "75 %",
        "25 %",
        "3.0 GiB",
        "1 min 1 s",
        "another attempt 5",
        "drafted tokens",
        "70 %",
        "88 %, 38 %",
        "sql, chat",
        "cut",
        "r1",
        "100.0 ms",
        "migrations",
        "migrations 3",
    ):
        assert word in text, word
    assert "out of memory" in text
    assert "its slot is empty" in text
    assert "does not answer" not in text


def test_pairs_that_cannot_hand_over_are_shown_with_the_reason_and_are_fields_for_programs() -> None:
    [pair] = status_to_proto(VIEW).refused_pairs
    assert (pair.prefill_engine, pair.decode_engine) == ("prefill-0", "decode-1")
    text = rendered(VIEW)
    assert "pairs that cannot hand over" in text
    assert "dtype: 'float32' at prefill-0, 'bfloat16' at decode-1" in text
    assert "cannot hand over" not in rendered(replace(VIEW, refused_pairs=()))
    many = rendered(replace(VIEW, refused_pairs=VIEW.refused_pairs * 30))
    assert "pairs that cannot hand over, 20 of 30" in many
    assert many.count("'bfloat16' at decode-1") == 20


def test_each_engine_is_shown_with_the_version_of_its_model() -> None:
    assert [engine.model_version for engine in status_to_proto(VIEW).engines] == [1, 2]
    old, new = (
        line.split() for line in rendered(VIEW).splitlines() if line.startswith(("prefill-0  pre", "prefill-1"))
    )
    assert (old[:5], new[:5]) == (
        ["prefill-0", "prefill", "2", "ready", "1"],
        ["prefill-1", "prefill", "1", "starting", "2"],
    )
    member = EngineDescriptor("decode-0", 1, EngineRole.DECODE, "host:2", model_version=3)
    [view] = merge_engines((), (member,), {})
    assert view.model_version == 3


def test_models_are_shown_with_what_keeps_them_from_serving() -> None:
    [old, new] = status_to_proto(VIEW).models
    assert (old.version, old.engines, old.requests, old.last_error) == (1, 2, 1, "")
    assert (new.version, new.directory) == (2, "checkpoints/new")
    text = rendered(VIEW)
    assert "model version 2: no tokenizer can be loaded" in text
    assert ["1", "2", "1", "checkpoints/old"] in [line.split() for line in text.splitlines()]
    assert "checkpoints" not in rendered(replace(VIEW, models=()))


@pytest.mark.parametrize("width", [60, 70, 80, 100, 120])
def test_on_a_narrow_screen_nothing_is_cut_off(width: int) -> None:
    text = rendered(VIEW, width)
    assert max(map(len, text.splitlines())) <= width
    for word in (
        "prefill-0",
        "waiting for KV",
        "prefix hits",
        "output tokens",
        "another attempt",
        "last error",
        "attempt",
    ):
        assert word in text, word
    assert text.count("prefill-0") > rendered(VIEW).count("prefill-0"), "each part names its engines"


def test_a_controller_that_is_silent_is_named_and_the_rest_is_shown() -> None:
    member = EngineDescriptor("decode-0", 1, EngineRole.DECODE, "host:2")
    engines = merge_engines((), (member,), {("decode-0", 1): (STATS, NOW_S)})
    text = rendered(ClusterView("demo", NOW_S, 1, engines, (), ControllerView(error="ActorDied: killed")))
    assert "the controller does not answer: ActorDied: killed" in text
    assert "connected" in text
    assert "75 %" in text


def test_both_sides_engines_are_put_together_with_the_fresher_numbers() -> None:
    old, new = SchedulerStats(num_running_reqs=1), SchedulerStats(num_running_reqs=2)
    known = EngineView("a", 1, "decode", "ready", "host:1", stats=old, stats_at_s=1.0)
    starting = EngineView("a", 2, "decode", "starting")
    members = (EngineDescriptor("a", 1, EngineRole.DECODE, "host:1"), EngineDescriptor("b", 1, EngineRole.BOTH, "x:2"))
    merged = merge_engines((known, starting), members, {("a", 1): (new, 2.0)})
    assert [(view.engine_id, view.incarnation, view.state) for view in merged] == [
        ("a", 1, "ready"),
        ("a", 2, "starting"),
        ("b", 1, "connected"),
    ]
    assert merged[0].stats is new
    assert merged[1].stats is None


async def test_a_request_is_seen_on_its_way() -> None:
    pair = make_pair()
    server = make_ingress_server(pair.serving)
    port = await server.start()
    try:
        async with GenerateClient(f"127.0.0.1:{port}") as client:
            stream = pair.serving.generate(HELLO)
            first = asyncio.ensure_future(anext(stream))
            producer, _ = await pair.next_requests()
            [request] = (await client.status()).requests
            assert (request.phase, request.attempt, request.output_tokens) == ("prefill", 1, 0)
            pair.prefill.send(producer, 0, "a", end_cause=EndCause.HANDED_OVER)
            await first
            status: admin_pb2.GetStatusResponse = await client.status()
            [request] = status.requests
            assert (request.phase, request.output_tokens) == ("decode", 1)
            assert request.prefill_engine
            assert request.decode_engine
            assert status.membership_version == 7
            await stream.aclose()
            assert not (await client.status()).requests
    finally:
        await server.drain(0)


def _costs_shown(*models: StepCostModel | None) -> str:
    engines = tuple(
        EngineView(f"decode-{number}", 1, "decode", "ready", stats=SchedulerStats(step_costs=model))
        for number, model in enumerate(models)
    )
    console = Console(file=StringIO(), width=300)
    console.print(render_costs(status_to_proto(replace(VIEW, engines=engines))))
    shown = console.file
    assert isinstance(shown, StringIO)
    return shown.getvalue()


def test_costs_have_a_row_for_each_engine_that_reported_any() -> None:
    residuals = (Residuals("decode", 60, -0.05, 0.01, 0.07, 0.03), Residuals("prefill"), Residuals("mixed", 9))
    fitted = StepCostModel(
        (0.010, 0.00025, *[0.0] * (NUM_FEATURES - 2)), residuals, num_drifts=3, updated_at_s=VIEW.now_s - 90
    )
    shown = _costs_shown(fitted, None, replace(fitted, residuals=residuals[:1], origin=CostOrigin.WARM_UP))
    rows = [line.split() for line in shown.splitlines() if line.strip().startswith("decode-")]
    assert [row[:7] for row in rows[:2]] == [
        ["decode-0", "yes", "own", "steps", "69", "3", "1"],
        ["decode-2", "not", "yet", "warm", "up", "60", "3"],
    ]
    assert "decode +1% (-5% to +7%), mixed +0% (+0% to +0%)" in shown
    assert "prefill +" not in shown
    assert {"1e+04", "250"} <= set(rows[2])


def test_costs_are_missing_until_an_engine_reports_them() -> None:
    assert _costs_shown(None) == "no engine has reported what its steps take\n"
