"""`raypd status`: print a running cluster's status as tables, once or refreshed until Ctrl-C."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Literal

from google.protobuf.json_format import MessageToJson
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.table import Table

from cluster.api.protos.raypd.v1 import admin_pb2
from cluster.client import CallFailed, GenerateClient

_MAX_REQUESTS = 20
_MAX_DECISIONS = 10
_MAX_REFUSED_PAIRS = 20
_GAP = 2
"""The number of blanks between columns."""


async def show_status(
    address: str, console: Console, *, watch_s: float | None, as_json: bool, timeout_s: float
) -> None:
    """Print the status once, or keep it on the screen. Raises ClusterError if the first call fails.

    watch_s: seconds between two refreshes; None prints the status once
    as_json: print the message as JSON, once
    """
    async with GenerateClient(address) as client:
        status = await client.status(timeout_s)
        if as_json:
            console.print_json(MessageToJson(status, preserving_proto_field_name=True))
            return
        if watch_s is None:
            console.print(render_status(status))
            return
        with Live(render_status(status), console=console, auto_refresh=False, screen=True) as live:
            while True:
                await asyncio.sleep(watch_s)
                try:
                    status = await client.status(timeout_s)
                    live.update(render_status(status), refresh=True)
                except CallFailed as error:
                    # The ingress may be replaced at the same address: the last status stays on the screen until then.
                    live.update(Group(f"[red]{address}: {error}[/]", render_status(status)), refresh=True)


def render_status(status: admin_pb2.GetStatusResponse) -> RenderableType:
    """Return the status as tables; a table without rows is left out, except that of the engines."""
    head = f"model [bold]{status.model}[/]  raypd {status.server_version}  membership {status.membership_version}"
    head += f"  requests in flight {len(status.requests)}"
    if status.migrations:
        head += f"  migrations {status.migrations}"
    parts: list[RenderableType] = [head, _engines(status.engines), *_troubles(status)]
    if status.models:
        parts.append(_models(status.models))
    if status.refused_pairs:
        parts.append(_refused_pairs(status.refused_pairs))
    if any(engine.attention_backend for engine in status.engines):
        parts.append(_attention(status.engines))
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
        lines.append(f"[red]the controller does not answer: {status.controller_error}[/]")
    if status.update:
        lines.append(f"[yellow]update: {status.update}[/]")
    lines += [f"[red]{engine.engine_id}: {engine.last_error}[/]" for engine in status.engines if engine.last_error]
    lines += [
        f"[red]model version {model.version}: {model.last_error}[/]" for model in status.models if model.last_error
    ]
    return lines


class _Table:
    """A table that splits its columns into several tables below each other if the screen is too narrow.

    Each of them begins with the first column. Columns whose names begin with a blank hold text, on the left; the others
    hold numbers, on the right. Text in the last column may wrap.
    """

    def __init__(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        self._title = title
        self._columns = list(columns)
        self._rows = [[str(cell) for cell in row] for row in rows]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        del console
        for number, columns in enumerate(self._split(options.max_width)):
            yield self._part(columns, self._title if number == 0 else None)

    def _split(self, width: int) -> list[list[int]]:
        """Return the indexes of the columns of each table. width: the screen's, in characters"""
        widths = [
            _GAP + max(len(cell.strip()) for cell in (name, *(row[index] for row in self._rows)))
            for index, name in enumerate(self._columns)
        ]
        if self._columns[-1].startswith(" "):
            widths[-1] = min(widths[-1], max(width // 4, len(self._columns[-1])))
        parts, left = [[0]], width - widths[0]
        for index in range(1, len(widths)):
            if widths[index] > left and len(parts[-1]) > 1:
                parts.append([0])
                left = width - widths[0]
            parts[-1].append(index)
            left -= widths[index]
        return parts

    def _part(self, columns: Sequence[int], title: str | None) -> Table:
        table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
        for index in columns:
            name = self._columns[index]
            is_text = name.startswith(" ")
            may_wrap = is_text and index == len(self._columns) - 1
            justify: Literal["left", "right"] = "left" if is_text else "right"
            table.add_column(name.strip(), justify=justify, no_wrap=not may_wrap, overflow="fold")
        for row in self._rows:
            table.add_row(*(row[index] for index in columns))
        return table


def _engines(engines: Iterable[admin_pb2.EngineStatus]) -> _Table:
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
    return _Table("engines", columns, (_engine_row(engine) for engine in engines))


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
        _age(engine.age_seconds),
    ]


def _models(models: Iterable[admin_pb2.ModelVersionStatus]) -> _Table:
    rows = [[model.version, model.engines, model.requests, model.directory] for model in models]
    return _Table("models", ("version", "engines", "requests", " directory"), rows)


def _refused_pairs(pairs: Sequence[admin_pb2.RefusedPair]) -> _Table:
    rows = [[pair.prefill_engine, pair.decode_engine, pair.reason] for pair in pairs[:_MAX_REFUSED_PAIRS]]
    title = "pairs that cannot hand over"
    if len(pairs) > _MAX_REFUSED_PAIRS:
        title += f", {_MAX_REFUSED_PAIRS} of {len(pairs)}"
    return _Table(title, (" from", " to", " why not"), rows)


def _attention(engines: Iterable[admin_pb2.EngineStatus]) -> _Table:
    rows = [[one.engine_id, one.attention_backend, one.attention_reason] for one in engines if one.attention_backend]
    return _Table("attention over the KV cache", (" engine", " by", " why"), rows)


def _transfers(engines: Iterable[admin_pb2.EngineStatus]) -> _Table:
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
            _age(transfers.oldest_pin_seconds) if transfers.active else "-",
            ", ".join(f"{reason} {count}" for reason, count in sorted(transfers.dropped_messages.items())) or "-",
        ]
        for engine in engines
        if (transfers := engine.transfers) is not None and engine.HasField("transfers")
    ]
    return _Table("KV transfers since each engine's start", columns, rows)


def _links(engines: Iterable[admin_pb2.EngineStatus]) -> _Table:
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
            _age(link.age_seconds),
            _age(link.idle_seconds),
            link.last_error or "-",
        ]
        for engine in engines
        for link in engine.links
    ]
    return _Table("links", columns, rows)


def _embeddings(engines: Iterable[admin_pb2.EngineStatus]) -> _Table:
    rows = [
        [engine.engine_id, images.received, images.failed, images.sent, images.not_sent]
        for engine in engines
        if (images := engine.embeddings) is not None and engine.HasField("embeddings")
    ]
    return _Table("embeddings, in images", (" engine", "received", "encoded here instead", "sent", "not sent"), rows)


def _stores(engines: Iterable[admin_pb2.EngineStatus]) -> _Table:
    rows = [
        [engine.engine_id, stores.saved_blocks, stores.unsaved_blocks, stores.loaded_blocks, stores.missing_blocks]
        for engine in engines
        if (stores := engine.stores) is not None and engine.HasField("stores")
    ]
    return _Table("KV stores, in blocks", (" engine", "saved", "not saved", "loaded", "missing"), rows)


def _spec_decoding(engines: Iterable[admin_pb2.EngineStatus]) -> _Table:
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
    return _Table("drafted tokens", columns, rows)


def _adapters(engines: Iterable[admin_pb2.EngineStatus]) -> _Table:
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
    return _Table("LoRA adapters", columns, rows)


def _ingresses(ingresses: Iterable[admin_pb2.IngressStatus]) -> _Table:
    rows = [
        [
            *(i.number, i.incarnation, _ingress_state(i), i.address or "-", i.http_address or "-", i.node or "-"),
            *(i.requests, i.last_error or "-"),
        ]
        for i in ingresses
    ]
    head = ("ingress", "incarnation", " state", " address", " HTTP", " node", "requests", " last error")
    return _Table("ingresses", head, rows)


def _ingress_state(ingress: admin_pb2.IngressStatus) -> str:
    return f"{ingress.state} for {ingress.busy_seconds:.0f} s" if ingress.state == "busy" else ingress.state


def _requests(requests: Sequence[admin_pb2.RequestInFlight]) -> _Table:
    columns = (" request", "age", " phase", " prefill", " decode", "prompt", "output", "attempt", "migrations")
    rows = [
        [
            f"{request.tenant}/{request.request_id}" if request.tenant else request.request_id,
            _age(request.age_seconds),
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
    return _Table(title, columns, rows)


def _decisions(decisions: Sequence[admin_pb2.Decision]) -> _Table:
    rows = [[_age(decision.age_seconds), decision.text] for decision in decisions[-_MAX_DECISIONS:]]
    return _Table("the controller's last decisions", ("ago", " what and why"), rows)


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


def _age(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
