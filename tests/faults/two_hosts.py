"""Two hosts within this one: network namespaces a and b that a veth pair joins, each in reach of the test's own.

    test's own ---- a (prefill) ---- b (decode) ---- test's own

Engines listen on the address of the pair between a and b; the test reaches it over a veth of its own, which stays up
whatever happens between the two.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_PREFIX: Final = "raypd-faults-"


class NoNamespaces(Exception):
    """This machine does not let us make them; says why."""


@dataclass(frozen=True, slots=True)
class TwoHosts:
    """namespaces and hosts (IP addresses): of a and b."""

    namespaces: tuple[str, str]
    hosts: tuple[str, str]

    @contextlib.contextmanager
    def dropping_everything(self) -> Iterator[None]:
        """Nothing passes between the two, in either direction, and nobody is told."""
        with self._queued_by("blackhole"):
            yield

    @contextlib.contextmanager
    def losing_packets(self) -> Iterator[str]:
        """Some packets are lost, in either direction; yields how: at random if the kernel can, else in bursts."""
        try:
            with self._queued_by("netem loss 5%"):
                yield "netem: 5 % at random"
        except NoNamespaces:
            # A token bucket whose queue holds two packets: of whatever comes faster than that, the rest is dropped.
            with self._queued_by("tbf rate 8mbit burst 3000 limit 3000"):
                yield "tbf: what exceeds a short queue"

    def num_dropped(self) -> int:
        """Packets that the queueing disciplines have dropped so far, both directions."""
        show = ("tc", "-s", "qdisc", "show", "dev", "between")
        statistics = "".join(run_ip("netns", "exec", name, *show) for name in self.namespaces)
        return sum(int(count) for count in re.findall(r"dropped (\d+)", statistics))

    @contextlib.contextmanager
    def _queued_by(self, discipline: str) -> Iterator[None]:
        try:
            for name in self.namespaces:
                _tc(name, "replace", *discipline.split())
            yield
        finally:
            for name in self.namespaces:
                with contextlib.suppress(NoNamespaces):
                    _tc(name, "del")


@contextlib.contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """Make them, and take them away whatever happens. Raises NoNamespaces."""
    _remove_abandoned()
    net = f"198.18.{os.getpid() % 250}"
    names = (f"{_PREFIX}{os.getpid()}-a", f"{_PREFIX}{os.getpid()}-b")
    outside = (f"rpf{os.getpid()}a", f"rpf{os.getpid()}b")
    hosts = (f"{net}.1", f"{net}.2")
    try:
        for name in names:
            run_ip("netns", "add", name)
            run_ip("-n", name, "link", "set", "lo", "up")
        run_ip(
            "link", "add", "between", "netns", names[0], "type", "veth", "peer", "name", "between", "netns", names[1]
        )
        for index, (name, host, device) in enumerate(zip(names, hosts, outside, strict=True)):
            run_ip("-n", name, "addr", "add", f"{host}/30", "dev", "between")
            run_ip("-n", name, "link", "set", "between", "up")
            _reach(name, host, device, f"{net}.{5 + 4 * index}", f"{net}.{6 + 4 * index}")
        yield TwoHosts(names, hosts)
    finally:
        _remove(names, outside)


def _reach(name: str, host: str, device: str, ours: str, theirs: str) -> None:
    """Let the test's own namespace reach this one's host address."""
    run_ip("link", "add", device, "type", "veth", "peer", "name", "test", "netns", name)
    run_ip("addr", "add", f"{ours}/30", "dev", device)
    run_ip("link", "set", device, "up")
    run_ip("-n", name, "addr", "add", f"{theirs}/30", "dev", "test")
    run_ip("-n", name, "link", "set", "test", "up")
    run_ip("route", "add", f"{host}/32", "dev", device, "src", ours)


def _remove(names: tuple[str, ...], outside: tuple[str, ...]) -> None:
    for arguments in [*(("link", "del", device) for device in outside), *(("netns", "del", name) for name in names)]:
        with contextlib.suppress(NoNamespaces):
            run_ip(*arguments)


def _remove_abandoned() -> None:
    """Remove the namespaces of test runs that were killed."""
    for name in run_ip("netns", "list").split():
        found = re.fullmatch(rf"{_PREFIX}(\d+)-([ab])", name)
        if found is not None and not Path("/proc", found[1]).exists():
            _remove((name,), (f"rpf{found[1]}{found[2]}",))


def _tc(name: str, verb: str, *discipline: str) -> str:
    return run_ip("netns", "exec", name, "tc", "qdisc", verb, "dev", "between", "root", *discipline)


def run_ip(*arguments: str) -> str:
    """Run the command ip. Raises NoNamespaces."""
    if shutil.which("ip") is None:
        raise NoNamespaces("there is no command ip")
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise NoNamespaces(f"ip {' '.join(arguments)}: {done.stderr.strip() or done.returncode}")
    return done.stdout
