"""The metrics of an ingress: labels that are bounded, and nothing that is not declared."""

from __future__ import annotations

import pytest

from cluster.errors import (
    AllowanceSpent,
    DeadlineExceeded,
    DeadlineUnreachable,
    InvalidRequest,
    NoEngineAvailable,
    Overloaded,
    OverloadLimit,
)
from cluster.observability.metrics import MAX_MODELS, ServingMetrics, exposition
from cluster.observability.metrics_page import SECTIONS, declarations
from tests.cluster.observability.exposed import VIEW, full_metrics, full_text, labels_by_sample, undeclared


def test_every_sample_is_declared_with_its_labels_and_every_declaration_is_told() -> None:
    declared = {name for one in declarations() for name in one.names}

    assert undeclared(full_text()) == {}
    untold = declared - labels_by_sample(full_text()).keys()
    assert untold == {name for one in SECTIONS["vLLM's names"] for name in one.names}


def test_a_sample_that_is_not_declared_is_noticed() -> None:
    assert undeclared('raypd_requests_total{outcome="stop"} 1.0') == {"raypd_requests_total": {"outcome"}}


def test_no_series_comes_twice() -> None:
    lines = [line.rpartition(" ")[0] for line in full_text().splitlines() if not line.startswith("#")]
    assert len(lines) == len(set(lines))


def test_adapters_beyond_the_bound_share_one_series_however_many_there_are() -> None:
    metrics = ServingMetrics()
    for number in range(1000):
        metrics.of_adapter(f"adapter-{number}").on_end("stop", 1.0)
    metrics.base.on_end("stop", 1.0)
    models = metrics.models()

    assert len(models) == MAX_MODELS + 1
    assert models["model"].outcomes == {"stop": 1}, "the base model has its own series, though it came last"
    assert models["other"].outcomes == {"stop": 1000 - (MAX_MODELS - 1)}


def test_a_request_for_an_unknown_adapter_makes_up_no_series() -> None:
    metrics = ServingMetrics()
    metrics.of_unknown().on_end("invalid", 1.0)
    assert set(metrics.models()) == {"model", "other"}


def test_a_reader_learns_of_no_adapter_that_it_may_not_use_and_misses_no_request() -> None:
    metrics = full_metrics()
    metrics.of_adapter("bobs-project").on_end("stop", 2.0)
    metrics.of_unknown().on_end("stop", 2.0)
    told = exposition(metrics, VIEW, {"sql"}.__contains__).decode()
    assert "bobs-project" not in told
    assert 'raypd_requests_total{model="other",outcome="stop"} 2.0' in told
    assert 'raypd_request_duration_seconds_sum{model="other"} 4.0' in told
    assert 'raypd_requests_total{model="sql",outcome="stop"} 1.0' in told
    assert 'raypd_requests_total{model="demo",outcome="stop"} 1.0' in told
    assert metrics.models()["bobs-project"].outcomes == {"stop": 1}, "others read what they read before"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (Overloaded("full", 1.0, limit=OverloadLimit.REQUESTS), "requests"),
        (Overloaded("full", 1.0, limit=OverloadLimit.WAITING_TOKENS), "waiting_tokens"),
        (Overloaded("full", 1.0), "memory"),
        (AllowanceSpent("alice", "2 requests/s", 1.0), "allowance"),
        (DeadlineUnreachable(1.0, 5.0), "deadline"),
        (NoEngineAvailable(), "no_engine"),
        (DeadlineExceeded("r"), None),
        (InvalidRequest(), None),
    ],
)
def test_refusals_are_counted_by_reason(error: Exception, reason: str | None) -> None:
    metrics = ServingMetrics()
    metrics.on_error(error)
    told = exposition(metrics, VIEW).decode()
    lines = [line for line in told.splitlines() if line.startswith("raypd_refused_requests_total")]
    assert len(lines) == 6, "reasons that have not occurred are 0, so that rates begin with the first one"
    counted = [line for line in lines if not line.endswith(" 0.0")]
    assert counted == ([] if reason is None else [f'raypd_refused_requests_total{{reason="{reason}"}} 1.0'])


def test_the_build_and_the_process_are_told() -> None:
    told = exposition(full_metrics(), VIEW).decode()
    assert 'raypd_build_info{python="' in told
    assert 'version="0.1"} 1.0' in told
    assert "process_cpu_seconds_total " in told
