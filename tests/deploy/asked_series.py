"""The series that rules, the dashboard, its annotations and its variables ask for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import promql_parser
import yaml
from prometheus_client.samples import Sample

_DEPLOY: Final = Path(__file__).parents[2] / "deploy"
RULES: Final = yaml.safe_load((_DEPLOY / "prometheus" / "rules.yaml").read_text())["groups"]
DASHBOARD: Final = json.loads((_DEPLOY / "grafana" / "raypd.json").read_text())
ADDED_BY_PROMETHEUS: Final = frozenset({"ray_io_cluster", "ray_io_group", "job", "instance"})


def panels() -> list[Any]:
    """The dashboard's panels, without the titles of its rows."""
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def queries() -> dict[str, str]:
    """All queries, by where they stand."""
    found = {
        f"rule {rule.get('record', rule.get('alert'))}": rule["expr"] for group in RULES for rule in group["rules"]
    }
    for panel in panels():
        for target in panel["targets"]:
            # Grafana's variable for a range that suits the panel's width.
            found[f"panel {panel['id']} {panel['title']} {target['refId']}"] = target["expr"].replace(
                "$__rate_interval", "5m"
            )
    for annotation in DASHBOARD["annotations"]["list"]:
        found[f"annotation {annotation['name']}"] = annotation["expr"]
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            found[f"variable {variable['name']}"] = _series_of(variable["query"])
    return found


def _series_of(variable: str) -> str:
    """The series whose label a variable of Grafana lists, chosen by that label as well."""
    listed = re.fullmatch(r"label_values\((\w+)(?:\{(.*)\})?, (\w+)\)", variable)
    assert listed is not None, variable
    name, chosen, label = listed.groups()
    matchers = ", ".join(filter(None, [chosen, f'{label}!=""']))
    return f"{name}{{{matchers}}}"


def nodes(query: str) -> list[Any]:
    """The parts of a query."""
    found: list[Any] = []
    promql_parser.walk(promql_parser.parse(query), found.append)
    return found


def selectors(query: str) -> Iterator[Any]:
    """The selectors of a query: each names a metric and chooses series of it by labels."""
    return (node for node in nodes(query) if isinstance(node, promql_parser.VectorSelector))


def is_chosen(selector: Any, sample: Sample) -> bool:
    """Whether a selector chooses a sample's series. Labels that Prometheus adds and variables match anything."""
    if sample.name != selector.name:
        return False
    for matcher in selector.matchers.matchers:
        if matcher.name in ADDED_BY_PROMETHEUS or "$" in matcher.value:
            continue
        value, wanted = sample.labels.get(matcher.name, ""), str(matcher.value)
        is_equal = re.fullmatch(wanted, value) is not None if "Re" in str(matcher.op) else value == wanted
        if is_equal == ("Not" in str(matcher.op)):
            return False
    return True
