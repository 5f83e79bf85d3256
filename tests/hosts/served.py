"""1P+2D on four hosts: the head and `raypd serve`, a prefill engine, two decode engines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.hosts.host import Host, HostProcess
from tests.hosts.network import Cable
from tests.hosts.ray_hosts import INGRESS_PORT, RayHosts

ROLE_OF_HOST: Final = {1: "prefill", 2: "decode", 3: "decode"}
ENGINE_TIMEOUT_S: Final = 2.0
HEARTBEAT_TIMEOUT_S: Final = 8.0


@dataclass(frozen=True, slots=True)
class Served:
    """directory: the model's."""

    ray: RayHosts
    process: HostProcess
    directory: Path

    @property
    def ingress_address(self) -> str:
        """host:port."""
        return self.ray.find_ingress()

    def host_at(self, address: str) -> Host:
        """The one with this IP address, or with this host:port on it."""
        return next(host for host in self.ray.hosts if host.address == address.partition(":")[0])

    def victim_number(self) -> int:
        """A decode engine's host on which there is neither the ingress nor the controller."""
        ingress = self.host_at(self.ingress_address)
        return next(
            number
            for number, role in ROLE_OF_HOST.items()
            if role == "decode"
            and self.ray.hosts[number] is not ingress
            and not self.ray.hosts[number].processes("ray::Controller")
        )


@contextmanager
def served_on(cables: Sequence[Cable], directory: Path, model: Path, config_directory: Path) -> Iterator[Served]:
    """Start everything, and end everything whatever happens."""
    ray = RayHosts(cables, directory)
    try:
        ray.start_head()
        ray.wait_started()
        for number, role in ROLE_OF_HOST.items():
            ray.start_node(number, {role: 1})
        ray.wait_started()
        process = ray.serve(_config(model), config_directory / "cluster.yaml")
        yield Served(ray, process, model)
        ray.stop(process)
        for host in ray.hosts:
            assert not host.processes("ray::EngineActor"), "an engine is left over"
    finally:
        ray.switch_off()
        directory.rmdir()


def _config(model: Path) -> dict[str, object]:
    return {
        "model": {"model": str(model), "dtype": "float32"},
        "cache": {"num_blocks": 256},
        "scheduler": {"max_num_batched_tokens": 48, "max_num_seqs": 32},
        "parallel": {"num_threads": 1},
        "prefill": {"count": 1, "num_cpus": 0, "resources": {"prefill": 1}},
        "decode": {"count": 2, "num_cpus": 0, "resources": {"decode": 1}},
        "ingress": {"host": "0.0.0.0", "port": INGRESS_PORT, "engine_timeout_s": ENGINE_TIMEOUT_S},
        "heartbeat_timeout_s": HEARTBEAT_TIMEOUT_S,
        "drain_timeout_s": 5,
    }
