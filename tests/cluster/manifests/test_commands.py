"""The pods of every overlay run what those of cpu-demo run, which tests/integration/test_ray_nodes.py starts."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.cluster.manifests.deployments import OVERLAYS, of_kind, rendered, settings, worker_groups

_CREDENTIALS = {"RAYPD_TLS_CA", "RAYPD_TOKEN_FILE"}


def _groups(overlay: str) -> dict[str, Any]:
    """The head's too."""
    head = of_kind(rendered(overlay), "RayCluster")["spec"]["headGroupSpec"]
    return {"head": head, **worker_groups(rendered(overlay))}


def _container(group: Any) -> Any:
    [container] = group["template"]["spec"]["containers"]
    return container


def _commands(overlay: str) -> dict[str, Any]:
    """Return everything that a shell or Ray gets to see of the Job and each group, but for numbers and credentials."""
    [submitter] = of_kind(rendered(overlay), "Job")["spec"]["template"]["spec"]["containers"]
    commands: dict[str, Any] = {"job": submitter["command"]}
    for name, group in _groups(overlay).items():
        container = _container(group)
        hook = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])
        commands[name] = {
            "command": (container.get("command"), container.get("args")),
            "before it stops": [re.sub(r"--wait-timeout \d+", "--wait-timeout N", part) for part in hook],
            "ray start": group["rayStartParams"],
            "resources": set(group["resources"]) - {"GPU"},
            "labels": group["labels"],
            "environment": {
                one["name"]: one.get("value") for one in container["env"] if one["name"] not in _CREDENTIALS
            },
        }
    return commands


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_commands_are_those_that_were_run(overlay: str) -> None:
    assert _commands(overlay) == _commands("cpu-demo")


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_differs_is_said_by_the_settings(overlay: str) -> None:
    config = settings(overlay)
    credentials = {"RAYPD_TLS_CA"} if config.kubernetes.tls else set()
    credentials |= {"RAYPD_TOKEN_FILE"} if config.kubernetes.tokens else set()
    for name, group in _groups(overlay).items():
        container = _container(group)
        has_gpus = "GPU" in group["resources"]
        assert ({one["name"] for one in container["env"]} & _CREDENTIALS) == (credentials if name != "head" else set())
        assert container.get("envFrom") == ([{"configMapRef": {"name": "raypd-nccl"}}] if has_gpus else None)
        if name == "head":
            continue
        [wait_s] = re.findall(r"--wait-timeout (\d+)", container["lifecycle"]["preStop"]["exec"]["command"][-1])
        grace_s = group["template"]["spec"]["terminationGracePeriodSeconds"]
        assert config.drain_timeout_s < int(wait_s) < grace_s
