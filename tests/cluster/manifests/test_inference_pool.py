"""The ingresses are an InferencePool, which a gateway's endpoint picker can read."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from cluster.config import ClusterConfig
from cluster.errors import InvalidConfig
from cluster.manifests.render import render
from tests.cluster.manifests.deployments import of_kind, rendered, worker_groups
from tests.cluster.manifests.inference_pool_schema import inference_pool_validator

DIALECT = {"http": {"metrics_dialects": ["vllm"]}}


def pool() -> Any:  # rendered YAML
    return copy.deepcopy(of_kind(rendered("gateway-inference"), "InferencePool"))


def test_the_pool_passes_the_apis_schema() -> None:
    assert [error.message for error in inference_pool_validator().iter_errors(pool())] == []


def test_a_field_that_the_api_does_not_know_is_noticed() -> None:
    wrong = pool()
    wrong["spec"]["targetPortNumber"] = 8000
    [error] = inference_pool_validator().iter_errors(wrong)
    assert "targetPortNumber" in error.message


def test_the_pool_selects_the_ingresses_and_no_other_pods() -> None:
    spec = pool()["spec"]
    service = of_kind(rendered("gateway-inference"), "Service", "raypd-http")["spec"]
    assert spec["selector"]["matchLabels"] == service["selector"]
    assert spec["targetPorts"] == [{"number": service["ports"][0]["port"]}]


def test_only_ingresses_have_the_label_that_names_vllms_metrics() -> None:
    labels = {
        name: group["template"]["metadata"]["labels"].get("llm-d.ai/engine-type")
        for name, group in worker_groups(rendered("gateway-inference")).items()
    }
    assert labels == {"ingress": "vllm", "prefill": None, "decode": None}


def test_without_the_setting_there_is_neither_a_pool_nor_a_label() -> None:
    assert [one for one in rendered("cpu-demo") if one["kind"] == "InferencePool"] == []
    assert (
        "llm-d.ai/engine-type" not in worker_groups(rendered("cpu-demo"))["ingress"]["template"]["metadata"]["labels"]
    )


@pytest.mark.parametrize(
    ("ingress", "kubernetes", "problem"),
    [({}, {}, "metrics_dialects"), ({"http": None}, {}, "metrics_dialects"), (DIALECT, {"tokens": {}}, "token")],
)
def test_a_pool_that_no_picker_could_read_is_refused(
    ingress: dict[str, Any], kubernetes: dict[str, Any], problem: str
) -> None:
    settings = {"ingress": ingress, "kubernetes": {"inference_pool": {}, **kubernetes}}
    with pytest.raises(InvalidConfig, match=problem):
        render(ClusterConfig.model_validate(settings))
