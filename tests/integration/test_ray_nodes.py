"""raypd in a Ray cluster of several nodes that is there before and after it: what the manifests would start, started
on nodes as KubeRay would make them; a job; attached and detached.

Tests of cluster/commands/operate.py, actors/ranks/rank_resources.py, actors/ranks/ray_executor.py.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from cluster.config import DEMO_MODEL
from tests.cluster.manifests.deployments import OVERLAYS, of_kind, rendered
from tests.integration.deployment import MAX_RANKS, Deployment
from tests.integration.pods import ROOT, Pods
from tests.patience import CLUSTER_S, TEST_S

pytestmark = [pytest.mark.more, pytest.mark.ray, pytest.mark.timeout(TEST_S)]

_NUM_LONG_TOKENS = 200
_ONE_ENGINE = ("--prefill", "0", "--decode", "0", "--both", "1")


@pytest.fixture(scope="module")
def pods() -> Iterator[Pods]:
    with Pods.started(of_kind(rendered("cpu-demo"), "RayCluster")) as pods:
        yield pods


@pytest.fixture(scope="module")
def deployment(request: pytest.FixtureRequest, pods: Pods, tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    overlay, max_ranks = request.param
    return Deployment(overlay, pods, tmp_path_factory.mktemp("deployment"), max_ranks)


_FOUR_RANKS = pytest.param(("rdma", 4), marks=pytest.mark.slow, id="rdma, four ranks")


def _on(*overlays: str, also: Sequence[ParameterSet] = ()) -> pytest.MarkDecorator:
    """On the pods of every overlay; but on these, behind `make test-slow`: each costs engines.

    Every overlay is in one, so that `raypd serve` with each one's configuration is run on its pods.
    """
    marks = {name: () if name in overlays else (pytest.mark.slow,) for name in OVERLAYS}
    cases = [pytest.param((name, MAX_RANKS), marks=mark, id=name) for name, mark in marks.items()]
    return pytest.mark.parametrize("deployment", [*cases, *also], indirect=True)


# The pods of gateway-inference run what those of cpu-demo run.
@_on(*(name for name in OVERLAYS if name != "gateway-inference"), also=[_FOUR_RANKS])
async def test_the_manifests_job_starts_a_cluster_on_the_pods_and_each_pod_drains_before_it_stops(
    deployment: Deployment,
) -> None:
    # An engine of several ranks has a pod of its own, with all of them: a pod has as many (only counted) GPUs.
    [ingress], [prefill], [decode] = (deployment.pods.of_group(group) for group in ("ingress", "prefill", "decode"))

    assert re.search(rf"ready .* at {deployment.address} \(gRPC", deployment.start())
    await deployment.check_that_it_serves()
    assert deployment.start() == "the cluster serves already\n"
    async with deployment.operator() as client:
        status = await client.status(60)
    assert {(engine.engine_id, engine.node) for engine in status.engines} == {
        ("prefill-0", prefill.address),
        ("decode-0", decode.address),
    }
    assert deployment.alive_actors() == _actors(deployment)
    assert deployment.pods.address_of_actor("IngressActor") == ingress.address
    assert deployment.pods.address_of_actor("Controller") in {ingress.address, prefill.address, decode.address}

    assert "drain there: decode-0\ndone" in deployment.before_stop("decode")
    assert f"drain there: {deployment.address}\ndone" in deployment.before_stop("ingress")
    assert not _is_open(deployment.address)

    assert deployment.run(*deployment.raypd("stop")) == "stopped\n"
    deployment.wait_until_gone()


def _actors(deployment: Deployment) -> list[str]:
    """Return the actors of one engine of each role, by name."""
    engine = ["EngineActor", *["RankActor"] * (deployment.config.parallel.tensor_parallel_size - 1)]
    return sorted(["Controller", "IngressActor", *engine * 2])


@_on("gpu-1p1d")
def test_doctor_finds_room_for_an_engine_on_each_pod(deployment: Deployment) -> None:
    examined = deployment.run(*deployment.raypd("doctor", "--config", str(deployment.config_file)))

    assert "failure" not in examined
    assert all(f"ok       room for {role} engines: 1 of " in examined for role in ("prefill", "decode")), examined
    assert "ok       room for ingresses: one on each of 1 nodes" in examined
    assert examined.count(" node: Python ") == len(deployment.pods.pods)


_WORKING_DIR = ("--working-dir", ".")
_MODULE = ("python", "-m", "cluster")
_ENVIRONMENTS = {"working-dir": (_WORKING_DIR, _MODULE), "installed": ((), ("raypd",)), "pip": (_WORKING_DIR, _MODULE)}
"""By the name of the file in deploy/ray/: further arguments of `ray job submit`, and raypd as it is called there."""


@_on("gpu-1p1d")
@pytest.mark.parametrize("environment", ["working-dir", pytest.param("pip", marks=pytest.mark.slow)])
async def test_a_submitted_job_serves_and_stopping_it_leaves_nothing(deployment: Deployment, environment: str) -> None:
    job = _submitted_job(deployment, environment)
    await deployment.check_that_it_serves()
    assert deployment.alive_actors() == _actors(deployment)
    with deployment.serve() as second:
        _read_until(
            second, "a raypd cluster runs in namespace 'raypd' of this Ray cluster already: stop it with `raypd"
        )
        assert second.wait(CLUSTER_S) == 1

    assert await _num_tokens_across(deployment, "ray", "job", "stop", job) == _NUM_LONG_TOKENS
    deployment.wait_until_gone()


@_on("gpu-1p1d")
def test_a_submitted_job_that_is_killed_leaves_nothing(deployment: Deployment) -> None:
    _submitted_job(deployment, "installed", *_ONE_ENGINE)

    deployment.driver_process().kill()
    deployment.wait_until_gone()


@_on("gpu-1p1d")
def test_a_model_that_cannot_be_served_ends_the_start_with_its_name_and_leaves_nothing(
    deployment: Deployment, tmp_path: Path
) -> None:
    directory = shutil.copytree(DEMO_MODEL, tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    # Only an engine finds out that the model's attention does not ask for the window.
    (directory / "config.json").write_text(json.dumps(config | {"sliding_window": 64}))

    with deployment.serve("--model", str(directory), *_ONE_ENGINE) as driver:
        said, _ = driver.communicate(timeout=CLUSTER_S)

    assert driver.returncode == 1, said
    assert "LlamaForCausalLM cannot be served: its config names a sliding window of 64" in said
    deployment.wait_until_gone()


@_on()
def test_an_attached_cluster_ends_when_whoever_started_it_is_killed(deployment: Deployment) -> None:
    with deployment.serve(*_ONE_ENGINE) as driver:
        try:
            _read_until(driver, "ready")
        finally:
            driver.kill()
    deployment.wait_until_gone()


def _submitted_job(deployment: Deployment, environment: str, *further: str) -> str:
    """Submit it, and return its id once it serves."""
    arguments, raypd = _ENVIRONMENTS[environment]
    submitted = deployment.run(
        *("ray", "job", "submit", "--no-wait", *arguments, "--runtime-env", f"deploy/ray/{environment}.yaml", "--"),
        *(*raypd, "serve", "--config", str(deployment.config_file), *further),
        directory=ROOT,
    )
    found = re.search(r"raysubmit_\w+", submitted)
    assert found is not None, submitted
    deployment.wait_for_log(found.group(0), rf"ready .* at {deployment.address} ")
    return found.group(0)


async def _num_tokens_across(deployment: Deployment, *stop: str) -> int:
    """Count the tokens of an answer that has begun when the cluster is told to stop, and that nobody tries again."""
    async with deployment.client() as client:
        answer = client.generate(
            "def f(n):", resume=False, max_tokens=_NUM_LONG_TOKENS, temperature=0.0, ignore_eos=True
        )
        num_tokens = len((await anext(answer)).token_ids)
        stopping = asyncio.create_task(asyncio.to_thread(deployment.run, *stop))
        async for response in answer:
            num_tokens += len(response.token_ids)
        await stopping
    return num_tokens


def _read_until(process: subprocess.Popen[str], pattern: str) -> None:
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line)
        if re.search(pattern, line) is not None:
            return
    raise AssertionError("".join(lines))


def _is_open(address: str) -> bool:
    host, _, port = address.partition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0
