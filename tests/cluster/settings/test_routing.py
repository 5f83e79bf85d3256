"""The settings `routing` and `slo`, and the refusal of ingress.router."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from actors.core.requests.slo import Slo
from cluster.access.aims import SloConfig
from cluster.config import ClusterConfig, load_cluster_config
from cluster.errors import InvalidConfig
from cluster.settings.routing import RoutingMode


def test_requests_go_by_cost_and_have_no_aims_by_default() -> None:
    config = ClusterConfig()
    assert config.routing.mode is RoutingMode.COST
    assert config.slo.aims.slo is None


@pytest.mark.parametrize("mode", RoutingMode)
def test_each_mode_has_its_name_in_the_settings_file(tmp_path: Path, mode: RoutingMode) -> None:
    file = tmp_path / "raypd.yaml"
    file.write_text(f"routing: {{mode: {mode.value}}}")
    assert load_cluster_config(file, {}).routing.mode is mode


def test_an_unknown_mode_is_refused_with_those_that_exist() -> None:
    with pytest.raises(InvalidConfig, match=r"routing\.mode = 'fast'.*'cost', 'disaggregate' or 'aggregate'"):
        load_cluster_config(None, {"routing": {"mode": "fast"}})


@pytest.mark.parametrize("old", ["prefix_aware", "least_loaded"])
def test_the_former_setting_of_ingresses_is_refused_with_its_successor(old: str) -> None:
    with pytest.raises(InvalidConfig) as refused:
        load_cluster_config(None, {"ingress": {"router": old}})
    message = str(refused.value)
    assert "ingress: router is now routing.mode" in message
    assert "in place of prefix_aware set routing.mode to disaggregate" in message
    assert "Nothing corresponds to least_loaded" in message


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, None),
        ({"ttft_ms": 500}, Slo(ttft_s=0.5)),
        ({"itl_ms": 40.0}, Slo(itl_s=0.04)),
        ({"ttft_ms": 1, "itl_ms": 3_600_000}, Slo(ttft_s=0.001, itl_s=3600.0)),
    ],
)
def test_aims_are_milliseconds_in_settings_and_seconds_in_engines(
    given: dict[str, float], expected: Slo | None
) -> None:
    assert load_cluster_config(None, {"slo": given}).slo.aims.slo == expected


@pytest.mark.parametrize("name", ["ttft_ms", "itl_ms"])
@pytest.mark.parametrize("value", [0, -1, 3_600_001, math.inf, math.nan, "soon"])
def test_an_aim_out_of_range_is_refused_by_its_name(name: str, value: float | str) -> None:
    with pytest.raises(InvalidConfig, match=rf"slo\.{name} = {value!r}"):
        load_cluster_config(None, {"slo": {name: value}})


def test_an_unknown_aim_is_refused() -> None:
    with pytest.raises(InvalidConfig, match=r"slo\.tpot_ms: there is no such setting"):
        load_cluster_config(None, {"slo": {"tpot_ms": 5}})
    assert SloConfig(itl_ms=None, ttft_ms=None).aims.slo is None
