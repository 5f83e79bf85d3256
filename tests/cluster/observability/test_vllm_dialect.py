"""Tools that know only vLLM's names read an ingress's own load, by the rule of an endpoint picker.

The picker takes the series of a name with the highest timestamp, which in Prometheus' text format is the first one.
"""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from cluster.observability.load_counts import RequestLoad
from cluster.observability.metrics import ServingMetrics
from cluster.observability.prometheus.exposition import to_text
from cluster.observability.vllm_dialect import DECLARATIONS, IngressLoad, VllmDialect

LOAD = IngressLoad(RequestLoad(3, 5), kv_cache_usage=0.25, block_size=16, num_blocks=400, max_adapters=4)


class Clock:
    now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


def samples(text: bytes) -> list[Sample]:
    return [sample for family in text_string_to_metric_families(text.decode()) for sample in family.samples]


def picked(text: bytes, name: str) -> Sample | None:
    """The series that a picker reads; None if there is none of that name."""
    found = [sample for sample in samples(text) if sample.name == name]
    return max(found, key=lambda one: one.timestamp or 0, default=None)


def value(text: bytes, name: str) -> float | None:
    found = picked(text, name)
    return None if found is None else found.value


def dialect(load: IngressLoad = LOAD, metrics: ServingMetrics | None = None) -> VllmDialect:
    return VllmDialect(metrics or ServingMetrics(), lambda: load, Clock(), lambda: 1_000.0)


def test_a_picker_reads_the_load_of_the_whole_ingress() -> None:
    text = dialect().text()
    assert value(text, "vllm:num_requests_waiting") == 3
    assert value(text, "vllm:num_requests_running") == 5
    assert value(text, "vllm:kv_cache_usage_perc") == 0.25
    cache = picked(text, "vllm:cache_config_info")
    assert cache is not None
    assert (cache.labels["block_size"], cache.labels["num_gpu_blocks"]) == ("16", "400")


def test_each_name_has_one_series_however_many_models_there_are() -> None:
    metrics = ServingMetrics()
    for figures in (metrics.base, metrics.of_adapter("sql"), metrics.of_adapter("chat")):
        figures.on_first_tokens(1, 0.3)
        figures.on_prompt(10, 4)
        figures.on_end("stop", 1.0)
    text = dialect(metrics=metrics).text()
    own = [
        (one.name, tuple(v for k, v in one.labels.items() if k in ("le", "finished_reason"))) for one in samples(text)
    ]
    assert len(own) == len(set(own))
    assert value(text, "vllm:generation_tokens_total") == 3
    assert value(text, "vllm:prefix_cache_hits_total") == 12
    assert value(text, "vllm:time_to_first_token_seconds_count") == 3
    assert value(text, "vllm:request_success_total") == 3


def test_adapters_are_told_from_the_first_one_on_and_stay() -> None:
    load = LOAD
    one = VllmDialect(ServingMetrics(), lambda: load, clock := Clock(), lambda: 1_000.0)
    assert picked(one.text(), "vllm:lora_requests_info") is None
    load = IngressLoad(RequestLoad(1, 1, ("sql",), ("chat", "sql")), max_adapters=4)
    clock.now_s += 1
    found = picked(one.text(), "vllm:lora_requests_info")
    assert found is not None
    assert found.value == 1_000.0
    assert found.labels == {"max_lora": "4", "running_lora_adapters": "chat,sql", "waiting_lora_adapters": "sql"}
    load = LOAD
    clock.now_s += 1
    found = picked(one.text(), "vllm:lora_requests_info")
    assert found is not None
    assert found.labels["running_lora_adapters"] == ""


def test_a_reader_who_may_not_use_all_adapters_learns_of_none() -> None:
    one = dialect(IngressLoad(RequestLoad(1, 1, ("sql",), ("chat",))))
    assert b"chat" in one.text()
    assert b"vllm:lora_requests_info{" not in one.text(names_adapters=False)
    assert value(one.text(names_adapters=False), "vllm:num_requests_running") == 1


def test_the_list_of_adapters_is_bounded() -> None:
    many = tuple(f"a{number}" for number in range(1000))
    found = picked(dialect(IngressLoad(RequestLoad(0, 1, (), many))).text(), "vllm:lora_requests_info")
    assert found is not None
    assert found.labels["running_lora_adapters"].count(",") == 63


def test_the_load_is_counted_at_most_ten_times_a_second() -> None:
    asked: list[float] = []
    clock = Clock()

    def load() -> IngressLoad:
        asked.append(clock.now_s)
        return LOAD

    one = VllmDialect(ServingMetrics(), load, clock)
    for _ in range(10):
        one.text()
        clock.now_s += 0.0625
    assert asked == pytest.approx([50.0, 50.125, 50.25, 50.375, 50.5])


def test_texts_made_from_a_template_are_those_of_the_metrics() -> None:
    metrics, clock, loads = ServingMetrics(), Clock(), [LOAD, IngressLoad(), IngressLoad(RequestLoad(7, 0), 0.5, 16, 9)]
    one = VllmDialect(metrics, lambda: loads[0], clock, lambda: 1_000.0)
    for number, model_name in enumerate(["model", "model", 'a "new" one']):
        metrics.model_name = model_name
        metrics.base.on_first_tokens(1, 0.3 * number)
        metrics.of_adapter("sql").on_next_tokens(2, 0.05)
        metrics.base.on_prompt(1_000_000 * number, 4)
        metrics.base.on_end("stop", 1.5)
        assert one.text() == to_text(one.collect())
        clock.now_s += 1.0
        loads.append(loads.pop(0))


def test_every_name_is_declared_with_its_labels() -> None:
    metrics = ServingMetrics()
    metrics.base.on_end("stop", 1.0)
    text = dialect(IngressLoad(RequestLoad(0, 1, (), ("sql",)), num_blocks=1), metrics).text()
    told = {one.name: set(one.labels) - {"le"} for one in samples(text)}
    assert told == {name: set(one.labels) for one in DECLARATIONS for name in one.names}
