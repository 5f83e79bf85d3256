"""A Ray cluster whose nodes are hosts of their own, and `raypd serve` on it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.hosts.host import Host, HostProcess
from tests.hosts.network import Cable

ROOT: Final = Path(__file__).parents[2]
RAY_PORT: Final = 6379
NODE_DEATH_S: Final = 20.0
"""Within so long Ray calls a node dead that is cut off, by the settings below; it takes 65 s without them."""

_BIN: Final = Path(sys.executable).parent
_RAY_TIMEOUT_S: Final = 60.0
_STARTED: Final = "Ray runtime started"
_TOO_SLOW: Final = "The current node timed out during startup"
_MAX_STARTS: Final = 3
_RAY_SETTINGS: Final = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "8",
    # Processes that nobody asked for yet cost this machine more than they save.
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
}


class RayHosts:
    """hosts: the first is the head's. Nothing is ever ended by `ray stop`."""

    def __init__(self, hosts: list[Host], directory: Path, settings: Mapping[str, str]) -> None:
        """directory: of the hosts' own file systems; settings: further environment of every process."""
        self.hosts = hosts
        self._directory = directory
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        self._environment = {
            **inherited,
            **_RAY_SETTINGS,
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "200",
            "PATH": f"{_BIN}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            **settings,
        }
        self._started_with: dict[int, tuple[Mapping[str, float], Mapping[str, str] | None]] = {}
        self.ray_processes: dict[int, HostProcess] = {}

    @classmethod
    @contextmanager
    def started(
        cls,
        cables: Sequence[Cable],
        resources: Mapping[int, Mapping[str, float]],
        settings: Mapping[str, str] | None = None,
        head_settings: Mapping[str, str] | None = None,
    ) -> Iterator[RayHosts]:
        """A head, and the nodes that have resources; nothing of them is left afterwards.

        resources: custom ones of each host, by its number
        settings: further environment of every process; head_settings: of the head's node alone
        """
        # Ray's sockets are in it, so its path must be short.
        directory = Path(f"/tmp/rph{os.getpid()}")
        ray = cls([Host(cable, directory) for cable in cables], directory, settings or {})
        try:
            ray.start(0, resources.get(0, {}), head_settings)
            ray.wait_started()
            for number in sorted(resources.keys() - {0}):
                ray.start(number, resources[number])
            ray.wait_started()
            yield ray
        finally:
            ray.switch_off()
            directory.rmdir()

    @property
    def ray_address(self) -> str:
        """The address of the head's GCS."""
        return f"{self.hosts[0].address}:{RAY_PORT}"

    def start(self, number: int, resources: Mapping[str, float], settings: Mapping[str, str] | None = None) -> None:
        """Switch a host on and start Ray on it: the head on the first one, else a node that joins.

        resources: custom ones; its CPUs are not counted
        settings: further environment of Ray's processes there
        """
        self._started_with[number] = resources, settings
        if number == 0:
            arguments = ["--head", "--port", str(RAY_PORT), "--include-dashboard", "false"]
            arguments += ["--temp-dir", str(self._directory)]
        else:
            arguments = ["--address", self.ray_address]
        host = self.hosts[number]
        host.switch_on()
        command = [str(_BIN / "ray"), "start", "--block", "--node-ip-address", host.address, *arguments]
        command += ["--num-cpus", "0", "--resources", json.dumps(dict(resources))]
        command += ["--object-store-memory", str(80 * 2**20), "--disable-usage-stats"]
        self.ray_processes[number] = host.run(command, {**self._environment, **(settings or {})}, ROOT)

    def start_again(self, number: int) -> None:
        """Start it as before, after its Ray has ended or its host was switched off."""
        self.hosts[number].switch_off()
        self.start(number, *self._started_with[number])

    def wait_started(self) -> None:
        """Wait until every host that was told to start Ray has started it.

        Ray gives a node up that has not registered after 30 s, as on a busy machine: it is started again, as Kubernetes
        starts a container again that has ended.
        """
        for number in list(self.ray_processes):
            for _ in range(_MAX_STARTS - 1):
                if self._has_started(number):
                    break
                self.start_again(number)
            else:
                assert self._has_started(number), self.ray_processes[number].lines

    def _has_started(self, number: int) -> bool:
        """Wait until Ray on this host has started, or has given up its start because it took too long."""
        process = self.ray_processes[number]
        if any(_STARTED in line for line in process.lines):
            return True
        try:
            process.wait_for_line(_STARTED, _RAY_TIMEOUT_S)
        except AssertionError:
            if any(_TOO_SLOW in line for line in process.lines):
                return False
            raise
        return True

    def raypd(self, *arguments: str) -> HostProcess:
        """Run our command on the head's host, which knows the Ray cluster."""
        command = [sys.executable, "-m", "cluster", *arguments, "--ray-address", self.ray_address]
        return self.hosts[0].run(command, self._environment, ROOT)

    def switch_off(self) -> None:
        """Everything on every host ends."""
        for host in self.hosts:
            host.switch_off()
