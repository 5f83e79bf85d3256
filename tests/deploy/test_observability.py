"""Rules and dashboard ask for metrics that there are, with labels that they have, in valid PromQL.

Tests of cluster/observability/metrics.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from cluster.observability.metrics_page import declarations
from tests.cluster.observability.exposed import full_text
from tests.deploy.asked_series import (
    ADDED_BY_PROMETHEUS,
    DASHBOARD,
    RULES,
    is_chosen,
    nodes,
    panels,
    queries,
    selectors,
)

_DEPLOY = Path(__file__).parents[2] / "deploy"
_OF_PROMETHEUS = {"up": set[str]()}


@cache
def _metrics() -> dict[str, set[str]]:
    """The labels of each metric that an ingress tells, by the name of its samples."""
    samples = [sample for family in text_string_to_metric_families(full_text()) for sample in family.samples]
    return {sample.name: set(sample.labels) for sample in samples}


def _rules(kind: str) -> list[Any]:
    return [rule for group in RULES for rule in group["rules"] if kind in rule]


def _selectors(query: str) -> Iterator[tuple[str, set[str]]]:
    """Each metric that is asked for, and the labels that it is chosen by."""
    for selector in selectors(query):
        yield str(selector.name), {matcher.name for matcher in selector.matchers.matchers}


def _labels_of_record(name: str) -> set[str]:
    [rule] = [rule for rule in _rules("record") if rule["record"] == name]
    return {label for node in nodes(rule["expr"]) for label in _grouping(node)}


def _grouping(node: Any) -> list[str]:
    is_grouping = isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None
    return list(node.modifier.labels) if is_grouping else []


def _known_labels(name: str) -> set[str] | None:
    """None if there is no such metric."""
    if name in {rule["record"] for rule in _rules("record")}:
        return _labels_of_record(name) | ADDED_BY_PROMETHEUS
    labels = _metrics().get(name, _OF_PROMETHEUS.get(name))
    return None if labels is None else labels | ADDED_BY_PROMETHEUS


@pytest.mark.parametrize("place", queries())
def test_a_query_asks_for_metrics_that_there_are(place: str) -> None:
    query = queries()[place]
    selectors = list(_selectors(query))

    assert selectors
    assert [name for name, _ in selectors if _known_labels(name) is None] == []
    for name, chosen_by in selectors:
        assert chosen_by - (_known_labels(name) or set()) == set(), f"{name} has no such label"
    available = set().union(*(_known_labels(name) or set() for name, _ in selectors))
    assert {label for node in nodes(query) for label in _grouping(node)} <= available


def test_a_series_is_chosen_by_all_of_a_selectors_labels() -> None:
    [one] = selectors('x{ray_io_cluster=~"$cluster", state="waiting", engine!~"decode.*"}')
    assert is_chosen(one, Sample("x", {"state": "waiting", "engine": "prefill-0"}, 1.0))
    assert not is_chosen(one, Sample("x", {"state": "waiting", "engine": "decode-0"}, 1.0))
    assert not is_chosen(one, Sample("x", {"state": "running", "engine": "prefill-0"}, 1.0))
    assert not is_chosen(one, Sample("y", {"state": "waiting", "engine": "prefill-0"}, 1.0))


def test_every_metric_of_an_ingress_is_shown_or_watched() -> None:
    asked = {name for query in queries().values() for name, _ in _selectors(query)}
    leaving = {one.name for one in declarations() if one.replaced_by}
    unseen = {name for name in _metrics() if name not in asked and not name.endswith(("_sum", "_count", "_created"))}
    unseen -= leaving

    assert unseen == set()
    assert leaving & asked == set(), "a metric that leaves is still asked for"


def test_a_variable_that_a_query_uses_is_one_of_the_dashboards() -> None:
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]} | {"__rate_interval"}
    text = json.dumps(DASHBOARD)
    assert set(re.findall(r"\$\{?(\w+)", text)) <= variables | {"__all"}


def test_each_alert_says_what_to_do_and_what_the_issue_wants_is_watched() -> None:
    alerts = {rule["alert"]: rule for rule in _rules("alert")}

    assert len(alerts) == len(_rules("alert"))
    for rule in alerts.values():
        assert rule["labels"]["severity"] in {"warning", "critical"}
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["description"]
    assert alerts.keys() >= {
        "RaypdErrorBudgetBurnsFast",
        "RaypdTransfersAreStuck",
        "RaypdBlocksPinnedTooLong",
        "RaypdEngineQuarantined",
        "RaypdPoolUnderPressure",
    }


def test_labels_in_an_alerts_text_are_those_of_its_query() -> None:
    for rule in _rules("alert"):
        used = set(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())))
        grouped = {label for node in nodes(rule["expr"]) for label in _grouping(node)}
        for name, _ in _selectors(rule["expr"]):
            grouped |= _labels_of_record(name) if name.startswith("raypd:") else set()
        assert used <= grouped, rule["alert"]


def test_the_operators_form_has_the_same_rules() -> None:
    resource = yaml.safe_load((_DEPLOY / "prometheus" / "prometheusrule.yaml").read_text())

    assert resource["spec"]["groups"] == RULES


def test_a_dashboards_panels_lie_beside_each_other_and_take_the_chosen_cluster() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not taken & cells
        taken |= cells
        assert at["x"] + at["w"] <= 24
        for target in panel["targets"]:
            selectors = list(_selectors(target["expr"].replace("$__rate_interval", "5m")))
            assert target["expr"].count('ray_io_cluster=~"$cluster"') == len(selectors)
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(numbers) == len(set(numbers))
