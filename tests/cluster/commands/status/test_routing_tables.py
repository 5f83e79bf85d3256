"""`raypd status` shows how requests were routed, at each ingress and in all, with the definition of the figures."""

from __future__ import annotations

from io import StringIO

import msgspec
from rich.console import Console

from cluster.api.grpc.conversions.status_messages import status_to_proto
from cluster.commands.status.status_screen import render_status
from cluster.observability.routing_figures import RoutingFigures, RoutingSummary, merged
from cluster.observability.status import ClusterView, ControllerView, IngressView, PrefixIndexView, RequestView
from cluster.routing.request_record import RequestRecord
from tests.cluster.routing.record_samples import ALONE, attempt, decision, record


def summary(*records: RequestRecord) -> RoutingSummary:
    figures = RoutingFigures()
    for one in records:
        figures.add(one, 0.0)
    return figures.summary(0.0)


def printed(*ingresses: RoutingSummary, requests: tuple[RequestView, ...] = ()) -> list[list[str]]:
    views = tuple(IngressView(number, 1, "ready", routing=one) for number, one in enumerate(ingresses))
    view = ClusterView("m", 1.0, 1, (), requests, ControllerView(ingresses=views), routing=merged(ingresses))
    output = StringIO()
    Console(file=output, width=150).print(render_status(status_to_proto(view)))
    return [line.split() for line in output.getvalue().splitlines()]


def test_each_ingress_and_all_have_their_shares_regret_and_error() -> None:
    alone = record(attempt(why=decision(ALONE, without_roles_s=2.0)))
    rows = printed(summary(record(), record()), summary(alone, record(), record(), record()))
    assert ["ingress", "0", "2", "0%", "100%", "0%", "0%", "0.80", "0.80"] in [row[:9] for row in rows]
    assert ["ingress", "1", "4", "25%", "75%", "0%", "0%"] in [row[:7] for row in rows]
    [whole] = [row for row in rows if row[:1] == ["all"]]
    assert whole[1:8] == ["6", "17%", "83%", "0%", "0%", "0.86", "0.86"]
    assert whole[8].endswith("%")
    assert any(row[:6] == ["regret:", "predicted", "cost", "of", "the", "chosen"] for row in rows)


def test_a_single_ingress_needs_no_row_of_its_own() -> None:
    rows = printed(summary(record()))
    assert [row[:2] for row in rows if row[:1] == ["all"]] == [["all", "1"]]
    assert ["ingress", "0"] not in [row[:2] for row in rows]


def test_requests_that_met_their_aims_are_shown_with_their_rate() -> None:
    figures = RoutingFigures()
    for second, has_met in enumerate((True, True, True, False, None)):
        figures.add(msgspec.structs.replace(record(), has_met_aims=has_met), float(second))
    rows = printed(figures.summary(10.0))
    [whole] = [row for row in rows if row[:1] == ["all"]]
    assert whole[-2:] == ["75%", "0.3/s"]
    assert any(row[:2] == ["met", "aims:"] for row in rows)
    without = printed(summary(record()))
    assert [row[-2:] for row in without if row[:1] == ["all"]] == [["-", "-"]]
    assert not any(row[:2] == ["met", "aims:"] for row in without)


def test_the_prefix_index_has_a_row_for_each_version_of_the_model() -> None:
    indexes = (
        PrefixIndexView(1, 1000, 3 << 20, 256 << 20, 2, num_lookups=8, num_hits=2, num_gaps=1, num_snapshots=3),
        PrefixIndexView(2, 0, 0, 256 << 20, 1),
    )
    output = StringIO()
    view = ClusterView("m", 1.0, 1, (), (), prefix_indexes=indexes)
    Console(file=output, width=150).print(render_status(status_to_proto(view)))
    rows = [line.split() for line in output.getvalue().splitlines()]
    assert ["1", "1000", "2", "3.0", "MiB", "256.0", "MiB", "8", "25%", "3", "1"] in rows
    assert ["2", "0", "1", "0.0", "MiB", "256.0", "MiB", "0", "-", "0", "0"] in rows


def test_without_requests_nothing_is_shown() -> None:
    assert not any("routing" in row for row in printed(RoutingSummary()))


def test_a_request_id_with_markup_is_shown_as_it_is() -> None:
    rows = printed(requests=(RequestView("[/red]x", 0.5, "prefill", tenant="t"),))
    assert any(row[:1] == ["t/[/red]x"] for row in rows)
