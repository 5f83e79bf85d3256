"""The part of `raypd status` about routing: the share of each way, the regret of roles, the error of predictions."""

from __future__ import annotations

from rich.console import RenderableType

from cluster.api.protos.raypd.v1 import admin_pb2
from cluster.commands.status.wide_table import WideTable

_WAYS = ("decode_alone", "prefill_decode", "prefill_alone", "fixed_rule")


def render_routing(status: admin_pb2.GetStatusResponse) -> list[RenderableType]:
    """Return a table with a row for each ingress and one for all, and what its figures mean; nothing without requests.

    The row of an ingress is left out if there is a single one.
    """
    whole = status.routing
    if not whole.requests and not whole.HasField("regret_since_start"):
        return []
    rows = [_row(f"ingress {one.number}", one.routing) for one in status.ingresses] if len(status.ingresses) > 1 else []
    rows.append(_row("all", whole))
    columns = [" ", "requests", *(way.replace("_", " ") for way in _WAYS), "regret", "since start", "TTFT error"]
    columns += ["met aims", "goodput"]
    tables: list[RenderableType] = [WideTable(f"routing of the last {whole.window_seconds:.0f} s", columns, rows)]
    if whole.HasField("regret_since_start"):
        tables.append(
            "regret: predicted cost of the chosen placements / of the best ones without roles; below 1 roles have "
            "paid. TTFT error: median of |measured / predicted - 1|"
        )
    if whole.HasField("aims_met"):
        tables.append(
            "met aims: of the requests with aims for their latencies; goodput: those that met them, per second"
        )
    return tables


def render_prefix_indexes(status: admin_pb2.GetStatusResponse) -> WideTable:
    """Return a table with a row for each version of the model: the prefixes that this ingress knows of."""
    columns = ("model version", "blocks", "every", "memory", "limit", "prompts", "with a prefix", "snapshots", "gaps")
    rows = [
        [
            index.version,
            index.blocks,
            index.stride,
            *(f"{size / 2**20:.1f} MiB" for size in (index.size_bytes, index.max_bytes)),
            index.lookups,
            f"{index.hits / index.lookups:.0%}" if index.lookups else "-",
            index.snapshots,
            index.gaps,
        ]
        for index in status.prefix_indexes
    ]
    return WideTable("prefixes that engines have cached, as this ingress knows them", columns, rows)


def _row(name: str, routing: admin_pb2.RoutingStatus) -> list[object]:
    shares = [f"{routing.requests_by_way[way] / routing.requests:.0%}" if routing.requests else "-" for way in _WAYS]
    regrets = [
        f"{getattr(routing, field):.2f}" if routing.HasField(field) else "-"
        for field in ("regret", "regret_since_start")
    ]
    error = f"{routing.ttft_error:.0%}" if routing.HasField("ttft_error") else "-"
    aims = f"{routing.aims_met:.0%}" if routing.HasField("aims_met") else "-"
    goodput = f"{routing.goodput_per_second:.3g}/s" if routing.HasField("goodput_per_second") else "-"
    return [name, routing.requests, *shares, *regrets, error, aims, goodput]
