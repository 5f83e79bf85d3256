"""The cluster as one ingress knows it, for Prometheus."""

from __future__ import annotations

from dataclasses import replace

from cluster.observability.prometheus.cluster_figures import collect_cluster
from cluster.observability.status import ClusterView, ControllerView
from tests.cluster.observability.exposed import VIEW


def values(view: ClusterView) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *sample.labels.values()): sample.value
        for metric in collect_cluster(view)
        for sample in metric.samples
    }


def test_the_controllers_part_has_its_age_and_its_newest_decision() -> None:
    found = values(VIEW)
    assert found["raypd_controller_up",] == 1
    assert found["raypd_controller_view_age_seconds",] == 2.0
    assert found["raypd_controller_decided_timestamp_seconds",] == 70.0
    assert found["raypd_ingresses", "ready"] == 1
    assert found["raypd_planner_action", "change"] == 1


def test_a_controller_that_never_answered_has_neither_age_nor_decisions() -> None:
    found = values(replace(VIEW, controller=ControllerView(error="gone")))
    assert found["raypd_controller_up",] == 0
    names = {name for name, *_ in found}
    assert not names & {"raypd_controller_view_age_seconds", "raypd_controller_decided_timestamp_seconds"}


def test_phases_without_requests_are_zero() -> None:
    found = values(VIEW)
    phases = ("admitted", "prefill", "decode")
    assert [found["raypd_requests_in_flight", phase] for phase in phases] == [0, 0, 1]


def test_lookups_of_cached_prefixes_are_hits_and_misses() -> None:
    found = values(VIEW)
    assert [found["raypd_prefix_index_lookups_total", "1", result] for result in ("hit", "miss")] == [2, 3]
