"""A Ray cluster of the run's own, which outlives `raypd serve`: what that leaves behind can be seen."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tests.patience import CLUSTER_S
from tests.ports import free_port

_BIN: Final = Path(sys.executable).parent
_GIVEN_BACK_TIMEOUT_S: Final = 60.0
_LEFTOVERS: Final = """
import json, sys, logging, time, ray
ray.init(address=sys.argv[1], namespace="raypd", log_to_driver=False, logging_level=logging.ERROR)

def leftovers():
    groups = ray.util.placement_group_table().values()
    return {
        "actors": [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)],
        "placement groups": [group["name"] for group in groups if group["state"] != "REMOVED"],
        "CPUs in use": ray.cluster_resources().get("CPU", 0) - ray.available_resources().get("CPU", 0),
    }

# What is given back reaches Ray's head after a while.
end_s = time.monotonic() + float(sys.argv[2])
while any((found := leftovers()).values()) and time.monotonic() < end_s:
    time.sleep(0.2)
print(json.dumps(found))
"""


class RayHead:
    """Starts on construction, in a directory of its own; ends with SIGTERM, never with `ray stop`."""

    def __init__(self, num_cpus: int, environment: Mapping[str, str]) -> None:
        # Ray's socket paths must be short.
        self.directory = Path(tempfile.mkdtemp(prefix="raypd-", dir="/tmp"))
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        self.environment = {
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
            "OMP_NUM_THREADS": "1",
            **environment,
        }
        self._port = free_port()
        self.address = f"127.0.0.1:{self._port}"
        command = (
            f"{_BIN}/ray start --head --block --node-ip-address 127.0.0.1 --port {self._port} --num-cpus {num_cpus} "
            f"--temp-dir {self.directory} --object-store-memory 80000000 --include-dashboard false "
            "--disable-usage-stats"
        )
        self._environment = inherited | self.environment
        self._process = subprocess.Popen(
            command.split(), env=self._environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def wait_until_up(self) -> None:
        """Until drivers can connect."""
        deadline_s = time.monotonic() + CLUSTER_S
        while True:
            assert self._process.poll() is None, "ray start ended"
            assert time.monotonic() < deadline_s, "ray does not answer"
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self._port)) == 0:
                    return
            time.sleep(0.2)

    def leftovers(self) -> dict[str, Any]:  # JSON
        """Return what is alive in the cluster, or holds resources of it; what is empty is left out."""
        command = [sys.executable, "-c", _LEFTOVERS, self.address, str(_GIVEN_BACK_TIMEOUT_S)]
        said = subprocess.run(
            command, env=self._environment, capture_output=True, text=True, timeout=CLUSTER_S, check=False
        )
        assert said.returncode == 0, said.stderr
        found: dict[str, Any] = json.loads(said.stdout.splitlines()[-1])
        return {what: which for what, which in found.items() if which}

    def stop(self, *, keeps_logs: bool) -> None:
        """Its directory goes with it, unless the logs in it are of use."""
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(CLUSTER_S)
        if not keeps_logs:
            shutil.rmtree(self.directory, ignore_errors=True)
