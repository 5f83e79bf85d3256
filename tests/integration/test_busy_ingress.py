"""An ingress whose event loop is busy for longer than a dead one may be silent: nobody is cut off."""

from __future__ import annotations

import asyncio
import re
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.api.protos.raypd.v1 import admin_pb2
from cluster.client import GenerateClient
from tests.chaos.reach import Reach
from tests.cluster.observability.exposed import undeclared
from tests.deploy.asked_series import is_chosen, queries, selectors
from tests.integration.cluster_load import load
from tests.integration.served import ServeProcess, process_listening_at
from tests.patience import CLUSTER_S, TEST_S

_BUSY_S = 12.0


@pytest.mark.more
@pytest.mark.ray
@pytest.mark.timeout(TEST_S)
async def test_an_ingress_with_a_busy_event_loop_lives_on_and_its_streams_too(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    directory, reach = checkpoint("llama"), Reach(tmp_path / "reach")
    config: dict[str, object] = {
        "model": {"model": str(directory), "dtype": "float32"},
        "cache": {"num_blocks": 256},
        "scheduler": {"max_num_batched_tokens": 48, "max_num_seqs": 32},
        "parallel": {"num_threads": 1},
        "prefill": {"count": 1, "num_cpus": 0.2},
        "decode": {"count": 1, "num_cpus": 0.2},
        "ingress": {"engine_timeout_s": 6.0, "http": {"port": 0}},
        "heartbeat_interval_s": 0.3,
        "heartbeat_timeout_s": 6.0,
    }
    process = ServeProcess(config, tmp_path, environment=reach.environment)
    try:
        address = await asyncio.to_thread(process.wait_until_ready)
        before = process_listening_at(int(address.rpartition(":")[2]))
        async with GenerateClient(address) as client, load(client, directory):
            reach.keep_busy(before.pid, _BUSY_S)
            status = await _until_it_has_time_again(client)
        assert process_listening_at(int(address.rpartition(":")[2])).pid == before.pid
        assert [(one.incarnation, one.state) for one in status.ingresses] == [(1, "ready")]
        assert {engine.incarnation for engine in status.engines} == {1}
        decisions = "\n".join(decision.text for decision in status.decisions)
        assert "give up" not in decisions
        assert re.search(r"ingress 0, incarnation 1 has been busy with one thing for \d+ s", decisions)
        for _ in range(2):  # The second answer counts the first one.
            metrics = await asyncio.to_thread(_metrics, process.http_address)
        [lag_s] = re.findall(r"^raypd_event_loop_lag_seconds (\S+)$", metrics, re.MULTILINE)
        assert _BUSY_S - 1 <= float(lag_s) < 60
        _check_against_dashboard(metrics)
        assert await asyncio.to_thread(process.stop) == 0, "\n".join(process.lines)
    finally:
        process.kill_if_alive()


async def _until_it_has_time_again(client: GenerateClient) -> admin_pb2.GetStatusResponse:
    async with asyncio.timeout(CLUSTER_S):
        while True:
            status: admin_pb2.GetStatusResponse = await client.status()
            if any("has time again" in decision.text for decision in status.decisions):
                return status
            await asyncio.sleep(0.2)


def _check_against_dashboard(metrics: str) -> None:
    """Hold that a cluster under load tells what is declared, and has the series that rules and dashboard ask for.

    Without drafts, stores, adapters, images, a planner, a certificate and a request trace, it has no metrics of these;
    nor has an idle one those of predictions.
    """
    may_not_have_happened = {"raypd_requests_total", "raypd_engines"}  # They are chosen by outcomes and states.
    told = [sample for family in text_string_to_metric_families(metrics) for sample in family.samples]
    features = "draft|store|adapter|image|planner|certificate|request_trace|ratio$|refused_messages|^up$|^raypd:"
    asked = [(place, one) for place, query in queries().items() for one in selectors(query)]
    unanswered = [
        f"{place}: {one}"
        for place, one in asked
        if not re.search(features, one.name)
        and not any(is_chosen(one, sample) for sample in told)
        and not (one.name in may_not_have_happened and any(sample.name == one.name for sample in told))
    ]
    assert len(asked) > 100
    assert unanswered == []
    assert undeclared(metrics) == {}
    answered = re.findall(r"^raypd_request_decode_seconds_count\{.*\} (\S+)$", metrics, re.MULTILINE)
    assert sum(map(float, answered)) > 0


def _metrics(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as answer:
        text: str = answer.read().decode()
    return text
