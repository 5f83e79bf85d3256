"""raypd in a Ray cluster that is there before and after it: as a job, attached, detached."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from cluster.client import GenerateClient
from cluster.ingress.protos.raypd.v1 import generate_pb2
from tests.integration.served import ROOT

pytestmark = [pytest.mark.ray, pytest.mark.timeout(420)]

_READY_TIMEOUT_S = 240.0
_GONE_TIMEOUT_S = 60.0
_NUM_LONG_TOKENS = 200
_BIN = Path(sys.executable).parent


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class RayHead:
    """A head node of its own, in a directory of its own; ends with SIGTERM, never with `ray stop`."""

    def __init__(self, directory: Path) -> None:
        gcs_port, dashboard_port = _free_port(), _free_port()
        self.address = f"127.0.0.1:{gcs_port}"
        self.dashboard = f"http://127.0.0.1:{dashboard_port}"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        self.environment = environment | {
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_agent_register_timeout_ms": "150000",
            "PATH": f"{_BIN}{os.pathsep}{os.environ['PATH']}",
        }
        command = (
            f"{_BIN}/ray start --head --block --node-ip-address 127.0.0.1 --port {gcs_port} --num-cpus 4 "
            f"--dashboard-port {dashboard_port} --temp-dir {directory} --object-store-memory 80000000 "
            "--include-dashboard true --disable-usage-stats"
        )
        self.process = subprocess.Popen(
            command.split(), env=self.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def run(self, *command: str) -> str:
        """Run one of Ray's own commands against this cluster, once it has an agent for it."""
        deadline_s = time.monotonic() + 180
        while True:
            result = subprocess.run(
                [str(_BIN / command[0]), *command[1:]],
                env=self.environment | {"RAY_ADDRESS": self.dashboard},
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
            if result.returncode == 0:
                return result.stdout
            is_too_early = "No available agent" in result.stderr and time.monotonic() < deadline_s
            assert is_too_early, f"{command}: {result.stdout}{result.stderr}"

    def get(self, path: str) -> object:
        """What the dashboard answers."""
        with urllib.request.urlopen(f"{self.dashboard}{path}", timeout=10) as answer:
            return json.load(answer)

    def wait_until_up(self, deadline_s: float) -> None:
        while True:
            assert self.process.poll() is None, "ray start ended"
            assert time.monotonic() < deadline_s, "the dashboard does not answer"
            try:
                self.get("/api/version")
            except OSError:
                time.sleep(0.5)
            else:
                return

    def stop(self) -> None:
        family = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)
        _, alive = psutil.wait_procs(family, timeout=20)
        for process in alive:
            process.kill()


@pytest.fixture(scope="module")
def head() -> Iterator[RayHead]:
    # Ray's socket paths must be short.
    directory = Path(f"/tmp/raypd-test-{os.getpid()}")
    cluster = RayHead(directory)
    try:
        cluster.wait_until_up(time.monotonic() + 60)
        yield cluster
    finally:
        cluster.stop()
        # A pip environment in it is as large as Ray's own.
        shutil.rmtree(directory, ignore_errors=True)


def _wait_for(head: RayHead, job: str, pattern: str, timeout_s: float) -> re.Match[str]:
    deadline_s = time.monotonic() + timeout_s
    while True:
        logs = head.run("ray", "job", "logs", job)
        if (found := re.search(pattern, logs)) is not None:
            return found
        assert time.monotonic() < deadline_s, logs
        time.sleep(1.0)


def _alive_actors(head: RayHead) -> list[str]:
    answer = head.get("/api/v0/actors?filter_keys=state&filter_predicates=%3D&filter_values=ALIVE")
    assert isinstance(answer, dict)
    actors = answer["data"]["result"]["result"]
    # The job's own supervisor belongs to Ray.
    return [actor["class_name"] for actor in actors if actor["class_name"] != "JobSupervisor"]


def _wait_until_gone(head: RayHead) -> None:
    deadline_s = time.monotonic() + _GONE_TIMEOUT_S
    while alive := _alive_actors(head):
        assert time.monotonic() < deadline_s, f"left: {alive}"
        time.sleep(0.5)


_WORKING_DIR = ("--working-dir", ".")
_MODULE = ("python", "-m", "cluster")
_ENVIRONMENTS = {"working-dir": (_WORKING_DIR, _MODULE), "installed": ((), ("raypd",)), "pip": (_WORKING_DIR, _MODULE)}
"""By the name of the file in deploy/ray/: further arguments of `ray job submit`, and raypd as it is called there."""


@pytest.mark.parametrize(
    "environment", ["working-dir", *(pytest.param(name, marks=pytest.mark.slow) for name in ("installed", "pip"))]
)
async def test_a_submitted_job_serves_and_stopping_it_leaves_nothing(head: RayHead, environment: str) -> None:
    arguments, raypd = _ENVIRONMENTS[environment]
    submitted = head.run(
        *("ray", "job", "submit", "--no-wait", *arguments, "--runtime-env", f"deploy/ray/{environment}.yaml", "--"),
        *(*raypd, "serve", "--port", "0"),
    )
    found = re.search(r"raysubmit_\w+", submitted)
    assert found is not None, submitted
    job = found.group(0)
    address = _wait_for(head, job, r"ready .* at (\S+:\d+)", _READY_TIMEOUT_S).group(1)

    async with GenerateClient(address) as client:
        responses = [
            response async for response in client.generate("def fibonacci(n):", max_tokens=16, temperature=0.0)
        ]
    assert "".join(response.text for response in responses)
    assert responses[-1].timings.transfer.kv_bytes > 0
    assert sorted(_alive_actors(head)) == ["Controller", "EngineActor", "EngineActor", "IngressActor"]

    assert await _num_tokens_across(address, lambda: head.run("ray", "job", "stop", job)) == _NUM_LONG_TOKENS
    _wait_until_gone(head)


async def _num_tokens_across(address: str, stop: Callable[[], object]) -> int:
    """Of an answer that has begun when the cluster is told to stop, and that nobody tries again."""
    async with GenerateClient(address) as client:
        answer = client.generate(
            "def f(n):", resume=False, max_tokens=_NUM_LONG_TOKENS, temperature=0.0, ignore_eos=True
        )
        num_tokens = len((await anext(answer)).token_ids)
        stopping = asyncio.create_task(asyncio.to_thread(stop))
        async for response in answer:
            num_tokens += len(response.token_ids)
        await stopping
    return num_tokens


@contextmanager
def _serve(head: RayHead, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`raypd serve`; it is gone afterwards."""
    command = (sys.executable, "-m", "cluster", "serve", "--ray-address", head.address, "--port", "0", *arguments)
    environment = head.environment | {"COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def _read_until(process: subprocess.Popen[str], pattern: str) -> re.Match[str]:
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line)
        if (found := re.search(pattern, line)) is not None:
            return found
    raise AssertionError("".join(lines))


async def _ask(address: str) -> generate_pb2.GenerateResponse:
    """The last response to a request."""
    async with GenerateClient(address) as client:
        return [response async for response in client.generate("def f(n):", max_tokens=4, temperature=0.0)][-1]


def _placement_groups(head: RayHead) -> list[str]:
    answer = head.get("/api/v0/placement_groups")
    assert isinstance(answer, dict)
    return [group["name"] for group in answer["data"]["result"]["result"] if group["state"] != "REMOVED"]


def test_a_detached_cluster_stays_until_it_is_stopped_and_there_is_only_one(head: RayHead) -> None:
    with _serve(head, "--detach") as starting:
        address = _read_until(starting, r"ready .* at (\S+:\d+)").group(1)
        assert starting.wait(60) == 0
    assert asyncio.run(_ask(address)).timings.transfer.kv_bytes > 0
    with _serve(head) as second:
        _read_until(second, "a raypd cluster runs in namespace 'raypd' of this Ray cluster already: end it with `raypd")
        assert second.wait(60) == 1
    assert sorted(_alive_actors(head)) == ["Controller", "EngineActor", "EngineActor", "IngressActor"]
    stopping = (sys.executable, "-m", "cluster", "stop", "--ray-address", head.address)
    stopped = subprocess.run(
        stopping, cwd=ROOT, env=head.environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert (stopped.returncode, stopped.stdout.strip()) == (0, "stopped"), stopped.stderr
    _wait_until_gone(head)
    assert not _placement_groups(head)


def test_an_attached_cluster_ends_when_whoever_started_it_is_killed(head: RayHead) -> None:
    with _serve(head) as driver:
        _read_until(driver, "ready")
    _wait_until_gone(head)
    assert not _placement_groups(head)
