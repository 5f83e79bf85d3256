from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from cluster.bench.arrivals import PlannedRequest
from cluster.commands.bench.bench_options import BenchOptions, check
from cluster.errors import InvalidConfig

URL = "http://127.0.0.1:8000"


def _options(**changed: Any) -> BenchOptions:
    return BenchOptions(**{"urls": [URL], "seed": 1, **changed})


def test_the_defaults_are_a_burst_of_100() -> None:
    benchmark = check(_options())
    plan = benchmark.plan(1)
    assert len(plan) == 100
    assert set(plan[1:2]) == {PlannedRequest(1, 0.0, 512, 128)}
    assert (benchmark.metrics, benchmark.percents) == (["ttft", "tpot", "itl", "e2el"], [50.0, 90.0, 99.0])
    assert benchmark.fields == {"ignore_eos": True}


def test_without_a_seed_each_benchmark_draws_one() -> None:
    assert check(_options(seed=None)).first_seed != check(_options(seed=None)).first_seed


def test_further_fields_are_those_of_extra_body_and_sampling() -> None:
    options = _options(ignore_eos=False, temperature=0.5, extra_body='{"top_k": 3}', headers=["X-A= b=c"])
    benchmark = check(options)
    assert (benchmark.fields, benchmark.headers) == ({"temperature": 0.5, "top_k": 3}, {"x-a": "b=c"})


@pytest.mark.parametrize(
    ("slo", "aims"),
    [
        (["ttft=500ms,itl=0.05s"], {"ttft_ms": 500.0, "itl_ms": 50.0}),
        (["ttft:500", "tpot:20", "itl:90"], {"ttft_ms": 500.0, "itl_ms": 20.0}),
        (["e2el=9s,tpot=20ms"], {"itl_ms": 20.0}),
    ],
)
def test_objectives_are_sent_as_the_aims_of_each_request(slo: list[str], aims: dict[str, float]) -> None:
    assert check(_options(slo=slo, sends_slo=True)).fields == {"ignore_eos": True, "slo": aims}
    assert check(_options(slo=slo)).fields == {"ignore_eos": True}


@pytest.mark.parametrize(
    ("changed", "mistake"),
    [
        ({"urls": ["ftp://a"]}, "'ftp://a' is no URL of a server"),
        ({"request_rate": 0.0}, "--request-rate must be above 0"),
        ({"request_rate": -1.0}, "--request-rate must be above 0"),
        ({"request_rate": math.nan}, "--request-rate must be above 0"),
        ({"request_rate": 1.0, "burstiness": 0.0}, "--burstiness must be above 0"),
        ({"burstiness": 2.0}, "--burstiness needs --request-rate"),
        ({"range_ratio": 1.0}, "--range-ratio must be from 0 to below 1"),
        ({"range_ratio": 0.5, "trace": Path("t")}, "--range-ratio has no effect with --trace"),
        ({"trace_speed": 2.0}, "--trace-speed has no effect without --trace"),
        ({"trace_speed": 2.0, "trace": Path("t"), "request_rate": 1.0}, "--trace-speed has no effect"),
        ({"trace_speed": 0.0, "trace": Path("t")}, "--trace-speed must be above 0"),
        ({"num_prefixes": 2}, "--num-prefixes has no effect without --prefix-len"),
        ({"urls": [URL, URL], "num_pairs": 4}, "--pairs must be at least 5"),
        ({"json_file": Path("/missing/folder/x.json")}, "--json /missing/folder/x.json cannot be written"),
        ({"json_file": Path("/")}, "--json / cannot be written"),
        ({"html_file": Path("/missing/folder/x.html")}, "--html /missing/folder/x.html cannot be written"),
        ({"slo": ["e2el=3s"], "sends_slo": True}, "--send-slo: it needs --slo with ttft, tpot or itl"),
        ({"slo": ["ttft=soon"]}, "--slo: 'ttft=soon' is not ttft, tpot"),
        ({"percentile_metrics": "ttft,latency"}, "--percentile-metrics: 'latency' is not one of ttft, tpot"),
        ({"percentile_metrics": " "}, "--percentile-metrics"),
        ({"metric_percentiles": "50,100"}, "--metric-percentiles: '50,100' is not a list"),
        ({"metric_percentiles": "median"}, "--metric-percentiles: 'median' is not a list"),
        ({"extra_body": "{"}, "--extra-body: it is not JSON"),
        ({"extra_body": "[]"}, "--extra-body: it is not a JSON object"),
        ({"extra_body": '{"stream": false}'}, "--extra-body: stream cannot be set"),
        ({"headers": ["x"]}, "--header: 'x' is not of the form NAME=VALUE"),
    ],
)
def test_each_mistake_is_named(changed: dict[str, Any], mistake: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        check(_options(**changed))
    assert mistake in str(caught.value)


def test_all_mistakes_are_named_at_once() -> None:
    with pytest.raises(InvalidConfig) as caught:
        check(_options(request_rate=0.0, slo=["x"], headers=["y"]))
    assert len(caught.value.mistakes) == 3


def test_a_trace_has_its_own_arrivals_unless_a_rate_is_given(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    trace.write_text(
        '{"timestamp": 0, "input_length": 3, "output_length": 4}\n'
        '{"timestamp": 5000, "input_length": 5, "output_length": 6}\n'
    )
    own = check(_options(trace=trace)).plan(1)
    assert own == [PlannedRequest(0, 0.0, 3, 4), PlannedRequest(1, 5.0, 5, 6)]
    other = check(_options(trace=trace, request_rate=4.0, burstiness=math.inf)).plan(1)
    assert other == [PlannedRequest(0, 0.25, 3, 4), PlannedRequest(1, 0.5, 5, 6)]
    assert check(_options(trace=trace, num_prompts=1)).plan(1) == own[:1]
