"""`raypd status`: print a running cluster's status as tables, once or refreshed until Ctrl-C."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from google.protobuf.json_format import MessageToJson
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape

from cluster.api.protos.raypd.v1 import admin_pb2
from cluster.client import CallFailed, GenerateClient
from cluster.commands.status.cost_tables import render_costs
from cluster.commands.status.plan_table import render_plan
from cluster.commands.status.routing_tables import render_prefix_indexes, render_routing
from cluster.commands.status.wide_table import WideTable, age

_MAX_REQUESTS = 20
_MAX_DECISIONS = 10
_MAX_REFUSED_PAIRS = 20


async def show_status(
    address: str,
    console: Console,
    *,
    watch_s: float | None,
    as_json: bool,
    timeout_s: float,
    with_costs: bool = False,
) -> None:
    """Print the status once, or keep it on the screen. Raises ClusterError if the first call fails.

    with_costs: print what the engines' steps take, as they predict it, in place of the other tables
    watch_s: seconds between two refreshes; None prints the status once
    as_json: print the message as JSON, once
    """
    render = render_costs if with_costs else render_status
    async with GenerateClient(address) as client:
        status = await client.status(timeout_s)
        if as_json:
            console.print_json(MessageToJson(status, preserving_proto_field_name=True))
            return
        if watch_s is None:
            console.print(render(status))
            return
        with Live(render(status), console=console, auto_refresh=False, screen=True) as live:
            while True:
                await asyncio.sleep(watch_s)
                try:
                    status = await client.status(timeout_s)
                    live.update(render(status), refresh=True)
                except CallFailed as error:
                    # The ingress may be replaced at the same address: the last status stays on the screen until then.
                    live.update(Group(f"[red]{address}: {error}[/]", render(status)), refresh=True)


def render_status(status: admin_pb2.GetStatusResponse) -> RenderableType:
    """Return the status as tables; a table without rows is left out, except that of the engines."""
    head = (
        f"model [bold]{escape(status.model)}[/]  raypd {status.server_version}  membership {status.membership_version}"
    )
    head += f"  requests in flight {len(status.requests)}"
    if status.migrations:
        head += f"  migrations {status.migrations}"
    parts: list[RenderableType] = [head, _engines(status.engines), *_troubles(status)]
    if status.models:
        parts.append(_models(status.models))
    if status.refused_pairs:
        parts.append(_refused_pairs(status.refused_pairs))
    parts += _choices(status.engines)
    if any(engine.HasField("transfers") for engine in status.engines):
        parts.append(_transfers(status.engines))
    if any(engine.links for engine in status.engines):
        parts.append(_links(status.engines))
    if any(engine.HasField("stores") for engine in status.engines):
        parts.append(_stores(status.engines))
    if any(engine.HasField("embeddings") for engine in status.engines):
        parts.append(_embeddings(status.engines))
    if any(engine.spec_decoding.drafts for engine in status.engines):
        parts.append(_spec_decoding(status.engines))
    if any(engine.HasField("adapters") for engine in status.engines):
        parts.append(_adapters(status.engines))
    parts += render_plan(status)
    parts += render_routing(status)
    if status.prefix_indexes:
        parts.append(render_prefix_indexes(status))
    if status.ingresses:
        parts.append(_ingresses(status.ingresses))
    if status.requests:
        parts.append(_requests(status.requests))
    if status.decisions:
        parts.append(_decisions(status.decisions))
    return Group(*parts)


def _troubles(status: admin_pb2.GetStatusResponse) -> list[str]:
    """Return a line for each error: the controller's, the engines' and the model versions', and a running update."""
    lines = []
    if status.controller_error:
        lines.append(f"[red]the controller does not answer: {escape(status.controller_error)}[/]")
    lines += [
        f"[yellow]ingress {ingress.number}: the request trace lacks {ingress.request_trace.dropped_lines} lines"
        f"{escape(f': {ingress.request_trace.error}' if ingress.request_trace.error else '')}[/]"
        for ingress in status.ingresses
        if ingress.request_trace.dropped_lines
    ]
    if status.update:
        lines.append(f"[yellow]update: {escape(status.update)}[/]")
    lines += [
        f"[red]{engine.engine_id}: {escape(engine.last_error)}[/]" for engine in status.engines if engine.last_error
    ]
    lines += [
        f"[red]model version {model.version}: {escape(model.last_error)}[/]"
        for model in status.models
        if model.last_error
    ]
    return lines


def _engines(engines: Iterable[admin_pb2.EngineStatus]) -> WideTable:
    columns = [
        " engine",
        " role",
        "incarnation",
        " state",
        "model",
        " node",
        " address",
        "running",
        "waiting",
        "waiting for KV",
        "held",
    ]
    columns += ("KV used", "prefix hits", "preempted", "prompt tokens", "output tokens", "as of")
    return WideTable("engines", columns, (_engine_row(engine) for engine in engines))


def _engine_row(engine: admin_pb2.EngineStatus) -> list[object]:
    head: list[object] = [engine.engine_id, engine.role, engine.incarnation, engine.state, engine.model_version]
    head += [engine.node, engine.address]
    if not engine.HasField("load"):
        return [*head, *["-"] * 10]
    load = engine.load
    num_found = load.prefix_cached_tokens + load.prefix_loaded_tokens
    return [
        *head,
        load.running,
        load.waiting,
        load.waiting_for_remote_kvs,
        load.held,
        _percent(load.blocks - load.free_blocks, load.blocks),
        _percent(num_found, load.prefix_queried_tokens),
        load.preemptions,
        load.prompt_tokens,
        load.output_tokens,
        age(engine.age_seconds),
    ]


def _models(models: Iterable[admin_pb2.ModelVersionStatus]) -> WideTable:
    rows = [[model.version, model.engines, model.requests, model.directory] for model in models]
    return WideTable("models", ("version", "engines", "requests", " directory"), rows)


def _refused_pairs(pairs: Sequence[admin_pb2.RefusedPair]) -> WideTable:
    rows = [[pair.prefill_engine, pair.decode_engine, pair.reason] for pair in pairs[:_MAX_REFUSED_PAIRS]]
    title = "pairs that cannot hand over"
    if len(pairs) > _MAX_REFUSED_PAIRS:
        title += f", {_MAX_REFUSED_PAIRS} of {len(pairs)}"
    return WideTable(title, (" from", " to", " why not"), rows)


def _choices(engines: Sequence[admin_pb2.EngineStatus]) -> list[WideTable]:
    """Return what the engines chose to compute with, and why; and which inputs they do not serve."""
    attention = [[one.engine_id, one.attention_backend, one.attention_reason] for one in engines]
    linears = [[one.engine_id, one.linear_layers] for one in engines]
    threads = [[one.engine_id, one.cpu_threads] for one in engines]
    left_out = [[one.engine_id, one.left_out_inputs] for one in engines]
    graphs = [
        [one.engine_id, one.cuda_graphs, one.load.replayed_steps, one.load.steps - one.load.replayed_steps]
        for one in engines
    ]
    tables = (
        ("attention over the KV cache", (" engine", " by", " why"), [row for row in attention if row[1]]),
        ("linear layers", (" engine", " weights"), [row for row in linears if row[1]]),
        ("threads", (" engine", " computes with"), [row for row in threads if row[1]]),
        (
            "served without its encoders",
            (" engine", " inputs that are not served"),
            [row for row in left_out if row[1]],
        ),
        (
            "CUDA graphs and compiled steps",
            (" engine", " captured or compiled", "replayed steps", "eager steps"),
            [row for row in graphs if row[1]],
        ),
    )
    return [WideTable(title, columns, rows) for title, columns, rows in tables if rows]


def _transfers(engines: Iterable[admin_pb2.EngineStatus]) -> WideTable:
    columns = [" engine", " by", "sent", "received", "chunks", "handed over", "failed", "cancelled", "retried"]
    columns += (
        "stalls",
        "corrupt",
        "links lost",
        "transfer",
        "exposed",
        "active",
        "pinned",
        "oldest pin",
        " dropped messages",
    )
    rows = [
        [
            engine.engine_id,
            engine.kv_transport or "-",
            _bytes(transfers.sent_bytes),
            _bytes(transfers.received_bytes),
            transfers.sent_chunks + transfers.received_chunks,
            transfers.completed,
            transfers.failed,
            transfers.cancelled,
            transfers.retries,
            transfers.stalls,
            transfers.corrupt_chunks,
            transfers.links_lost,
            _milliseconds(transfers.mean_transfer_seconds),
            _milliseconds(transfers.mean_exposed_seconds),
            transfers.active,
            transfers.pinned_blocks,
            age(transfers.oldest_pin_seconds) if transfers.active else "-",
            ", ".join(f"{reason} {count}" for reason, count in sorted(transfers.dropped_messages.items())) or "-",
        ]
        for engine in engines
        if (transfers := engine.transfers) is not None and engine.HasField("transfers")
    ]
    return WideTable("KV transfers since each engine's start", columns, rows)


def _links(engines: Iterable[admin_pb2.EngineStatus]) -> WideTable:
    columns = (" engine", " end", " peer", "incarnation", " state", "transfers", "bytes", "age", "idle", " last error")
    rows = [
        [
            engine.engine_id,
            link.end,
            link.peer_engine_id,
            link.peer_incarnation,
            link.state,
            link.active_transfers,
            _bytes(link.bytes),
            age(link.age_seconds),
            age(link.idle_seconds),
            link.last_error or "-",
        ]
        for engine in engines
        for link in engine.links
    ]
    return WideTable("links", columns, rows)


def _embeddings(engines: Iterable[admin_pb2.EngineStatus]) -> WideTable:
    rows = [
        [engine.engine_id, images.received, images.failed, images.sent, images.not_sent]
        for engine in engines
        if (images := engine.embeddings) is not None and engine.HasField("embeddings")
    ]
    return WideTable("embeddings, in images", (" engine", "received", "encoded here instead", "sent", "not sent"), rows)


def _stores(engines: Iterable[admin_pb2.EngineStatus]) -> WideTable:
    rows = [
        [engine.engine_id, stores.saved_blocks, stores.unsaved_blocks, stores.loaded_blocks, stores.missing_blocks]
        for engine in engines
        if (stores := engine.stores) is not None and engine.HasField("stores")
    ]
    return WideTable("KV stores, in blocks", (" engine", "saved", "not saved", "loaded", "missing"), rows)


def _spec_decoding(engines: Iterable[admin_pb2.EngineStatus]) -> WideTable:
    rows = [
        [
            engine.engine_id,
            decoding.drafts,
            decoding.draft_tokens,
            _percent(decoding.accepted_tokens, decoding.draft_tokens),
            ", ".join(_percent(count, decoding.drafts) for count in decoding.accepted_tokens_per_pos),
        ]
        for engine in engines
        if (decoding := engine.spec_decoding).drafts
    ]
    columns = (" engine", "drafts", "tokens", "accepted", " accepted of first, second, … tokens")
    return WideTable("drafted tokens", columns, rows)


def _adapters(engines: Iterable[admin_pb2.EngineStatus]) -> WideTable:
    columns = (" engine", "requests waiting", "loads", "failed", "evicted", " loaded")
    rows = [
        [
            engine.engine_id,
            adapters.waiting,
            adapters.loads,
            adapters.failed_loads,
            adapters.evictions,
            ", ".join(adapters.loaded) or "-",
        ]
        for engine in engines
        if (adapters := engine.adapters) is not None and engine.HasField("adapters")
    ]
    return WideTable("LoRA adapters", columns, rows)


def _ingresses(ingresses: Iterable[admin_pb2.IngressStatus]) -> WideTable:
    rows = [
        [
            *(i.number, i.incarnation, _ingress_state(i), i.address or "-", i.http_address or "-", i.node or "-"),
            *(i.requests, i.last_error or "-"),
        ]
        for i in ingresses
    ]
    head = ("ingress", "incarnation", " state", " address", " HTTP", " node", "requests", " last error")
    return WideTable("ingresses", head, rows)


def _ingress_state(ingress: admin_pb2.IngressStatus) -> str:
    return f"{ingress.state} for {ingress.busy_seconds:.0f} s" if ingress.state == "busy" else ingress.state


def _requests(requests: Sequence[admin_pb2.RequestInFlight]) -> WideTable:
    columns = (" request", "age", " phase", " prefill", " decode", "prompt", "output", "attempt", "migrations")
    rows = [
        [
            f"{request.tenant}/{request.request_id}" if request.tenant else request.request_id,
            age(request.age_seconds),
            request.phase,
            request.prefill_engine or "-",
            request.decode_engine or "-",
            request.prompt_tokens,
            request.output_tokens,
            request.attempt,
            request.migrations,
        ]
        for request in requests[:_MAX_REQUESTS]
    ]
    title = "requests" if len(requests) <= _MAX_REQUESTS else f"requests, the oldest {_MAX_REQUESTS} of {len(requests)}"
    return WideTable(title, columns, rows)


def _decisions(decisions: Sequence[admin_pb2.Decision]) -> WideTable:
    rows = [[age(decision.age_seconds), decision.text] for decision in decisions[-_MAX_DECISIONS:]]
    return WideTable("the controller's last decisions", ("ago", " what and why"), rows)


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "-"


def _bytes(count: int) -> str:
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds else "-"
