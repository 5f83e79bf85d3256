"""docs/metrics.md says what the code says.

Tests of cluster/observability/metrics_page.py and cluster/observability/prometheus/routing_metrics.py.
"""

from __future__ import annotations

from collections import Counter

from cluster.observability.metrics_page import declarations, to_markdown
from cluster.observability.prometheus.declaration import Kind
from tools.write_metrics_page import PAGE, main


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == to_markdown(), "run `make metrics`"
    assert main(["--check"]) == 0


def test_each_metric_has_a_row_with_everything_that_a_query_needs() -> None:
    page = to_markdown()
    labels = "`engine`, `role`, `outcome`"
    assert f"| `raypd_transfers_total` | counter | {labels} |  | KV transfers that have ended, by outcome. |" in page
    assert "Buckets of `raypd_request_queue_seconds`, `raypd_request_prefill_seconds`" in page
    assert "Leaves with the next release: use `raypd_transfer_duration_seconds`." in page


def test_names_are_unique_and_say_their_kind() -> None:
    all_declared = list(declarations())
    assert [name for name, count in Counter(one.name for one in all_declared).items() if count > 1] == []
    for one in all_declared:
        assert one.name.endswith("_total") is (one.kind is Kind.COUNTER), one.name
        assert bool(one.buckets) is (one.kind is Kind.HISTOGRAM), one.name
        assert one.meaning.endswith("."), one.name


def test_what_replaces_a_metric_is_there() -> None:
    names = {one.name for one in declarations()}
    replaced = [one for one in declarations() if one.replaced_by]
    assert replaced
    assert {one.replaced_by for one in replaced} <= names
