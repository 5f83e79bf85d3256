"""A local cluster's ports, and who can enter its directory: by the kernel's own tables."""

from __future__ import annotations

import ipaddress
import json
import os
import stat
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.patience import TEST_S

pytestmark = [pytest.mark.ray, pytest.mark.timeout(TEST_S)]

_CLUSTER = """
import json, sys
from cluster.start import local_ray
from cluster.config import ClusterConfig
config = local_ray.connect(ClusterConfig())
import ray
class Actor:
    def is_there(self):
        return True
actor = ray.remote(Actor).options(num_cpus=0).remote()
assert ray.get(actor.is_there.remote(), timeout=300)
print(json.dumps(config.engine_host), flush=True)
sys.stdin.readline()
local_ray.disconnect()
"""


def _sockets_of(family: list[psutil.Process]) -> set[str]:
    """Inode numbers."""
    found = set()
    for process in family:
        directory = Path(f"/proc/{process.pid}/fd")
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            for fd in directory.iterdir():
                with suppress(FileNotFoundError):
                    found.add(str(fd.readlink()).removeprefix("socket:[").removesuffix("]"))
    return found


def _words_of(family: list[psutil.Process]) -> list[str]:
    """The words of their command lines."""
    words: list[str] = []
    for process in family:
        with suppress(psutil.NoSuchProcess):
            words += process.cmdline()
    return words


def _listeners(inodes: set[str]) -> set[tuple[str, int]]:
    """Address and port of every TCP socket that listens, and of every UDP socket, as ss reads them."""
    found = set()
    for name in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in inodes and (name.startswith("udp") or fields[3] == "0A"):
                address, port = fields[1].split(":")
                words = [bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8)]
                found.add((str(ipaddress.ip_address(b"".join(words))), int(port, 16)))
    return found


def _is_loopback(address: str) -> bool:
    parsed = ipaddress.ip_address(address)
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_loopback


@pytest.mark.more
def test_a_local_cluster_listens_on_loopback_only_and_nobody_else_enters_its_directory() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    # Short: Unix sockets are in there.
    driver = subprocess.Popen(
        [sys.executable, "-c", _CLUSTER],
        env=environment | {"TMPDIR": "/tmp"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert driver.stdout is not None
        assert json.loads(driver.stdout.readline()) == "127.0.0.1"
        process = psutil.Process(driver.pid)
        family = [process, *process.children(recursive=True)]
        listeners = _listeners(_sockets_of(family))
        assert len(listeners) >= 6, "Ray's own processes are among them"
        words = _words_of(family)
        programs = " ".join(words)
        assert "agent_stand_in.py" in programs
        for left_out in ("dashboard/agent.py", "dashboard/dashboard.py", "autoscaler", "log_monitor.py"):
            assert f"/{left_out}" not in programs, "needed_processes.py"
        assert {one for one in listeners if not _is_loopback(one[0])} == set()

        options = ("--temp_dir=/", "--temp-dir=/")
        [directory] = {word.partition("=")[2] for word in words if word.startswith(options)}
        ray_directory = Path(directory)
        assert stat.S_IMODE(ray_directory.parent.stat().st_mode) == 0o700
        driver.communicate("\n", timeout=TEST_S)
        assert driver.returncode == 0
        assert not ray_directory.parent.exists(), "it is removed at the end"
    finally:
        driver.kill()
        driver.wait()
        for pipe in (driver.stdin, driver.stdout):
            assert pipe is not None
            pipe.close()
