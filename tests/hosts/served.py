"""1P+2D on four hosts: the head and `raypd serve`; the ingress and a prefill engine; two decode engines."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import yaml

from tests.hosts.host import Host
from tests.hosts.network import Cable
from tests.hosts.ray_hosts import RayHosts

ENGINE_TIMEOUT_S: Final = 2.0
HEARTBEAT_TIMEOUT_S: Final = 8.0
DECODE_HOSTS: Final = (2, 3)

Layout = Mapping[int, Mapping[str, float]]
"""Ray resources by the host's number."""

FULL: Final[Layout] = {
    1: {"prefill": 1, "ingress": 1},
    2: {"decode": 1, "controller": 1},
    3: {"decode": 1, "controller": 1},
}
"""A decode engine has room on its own host only; the controller is on one of the two."""
ROOMY: Final[Layout] = {0: {"ingress": 1, "controller": 1}, 1: {"prefill": 1}, 2: {"decode": 2}, 3: {"decode": 2}}
"""A decode host has room for both decode engines; the head's host is never lost."""

_SERVE_TIMEOUT_S: Final = 300.0
_STOP_TIMEOUT_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class Served:
    """address: the ingress's; directory: the model's."""

    ray: RayHosts
    address: str
    directory: Path

    def host_at(self, address: str) -> Host:
        """The one with this IP address, or with this host:port on it."""
        return next(host for host in self.ray.hosts if host.address == address.partition(":")[0])

    def number_of_controller(self) -> int:
        """The number of the host that the controller is on."""
        return next(number for number, host in enumerate(self.ray.hosts) if host.processes("ray::Controller"))

    def victim(self) -> int:
        """The number of a host with a decode engine and without the controller."""
        return next(number for number in DECODE_HOSTS if number != self.number_of_controller())


@contextmanager
def served_on(
    cables: Sequence[Cable],
    layout: Layout,
    model: Path,
    directory: Path,
    settings: Mapping[str, str] | None = None,
    head_settings: Mapping[str, str] | None = None,
) -> Iterator[Served]:
    """Start everything, and end everything whatever happens.

    settings: further environment of every process on every host; head_settings: of the head's node alone
    """
    config_file = directory / "cluster.yaml"
    config_file.write_text(yaml.safe_dump(_config(model)))
    with RayHosts.started(cables, layout, settings, head_settings) as ray:
        serve = ray.raypd("serve", "--detach", "--config", str(config_file))
        line = serve.wait_for_line("ready ", _SERVE_TIMEOUT_S)
        found = re.search(r"ready .* at (\S+:\d+)", line)
        assert found is not None, line
        assert serve.wait() == 0
        yield Served(ray, found.group(1), model)
        stop = ray.raypd("stop", "--config", str(config_file))
        assert stop.wait(_STOP_TIMEOUT_S) == 0, stop.lines
        for host in ray.hosts:
            assert not host.processes("ray::EngineActor"), "an engine is left over"


def _config(model: Path) -> dict[str, object]:
    return {
        "model": {"model": str(model), "dtype": "float32"},
        "cache": {"num_blocks": 256},
        "scheduler": {"max_num_batched_tokens": 48, "max_num_seqs": 32},
        "parallel": {"num_threads": 1},
        "prefill": {"count": 1, "num_cpus": 0, "resources": {"prefill": 1}},
        "decode": {"count": 2, "num_cpus": 0, "resources": {"decode": 1}},
        "routing": {"mode": "disaggregate"},
        "ingress": {
            "host": "0.0.0.0",
            "insecure": True,
            "engine_timeout_s": ENGINE_TIMEOUT_S,
            "resources": {"ingress": 1},
        },
        "controller": {"resources": {"controller": 1}},
        "heartbeat_timeout_s": HEARTBEAT_TIMEOUT_S,
        "drain_timeout_s": 5,
    }
