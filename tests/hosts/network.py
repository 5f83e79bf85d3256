"""Hosts within this one, as far as the network is concerned: network namespaces on one bridge.

    the test's own (…254) ---- bridge ---- host 0 (…1), host 1 (…2), …

A host is cut off by taking down the bridge's end of its cable: nothing passes in either direction, and nobody is told.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.faults.two_hosts import NoNamespaces, run_ip

_PREFIX: Final = "raypd-hosts-"


@dataclass(frozen=True, slots=True)
class Cable:
    """Joins one host to the bridge. namespace: the host's; device: the bridge's end; address: the host's."""

    namespace: str
    device: str
    address: str
    bridge: str

    def cut(self) -> None:
        """Nothing passes any more."""
        run_ip("link", "set", self.device, "down")

    def join(self) -> None:
        """Things pass again; does nothing if they do."""
        run_ip("link", "set", self.device, "up")

    @contextlib.contextmanager
    def cut_off(self) -> Iterator[None]:
        """Nothing passes until the block's end."""
        self.cut()
        try:
            yield
        finally:
            self.join()


@contextlib.contextmanager
def bridged(num_hosts: int) -> Iterator[tuple[Cable, ...]]:
    """Make so many hosts' networks, and take them away whatever happens. Raises NoNamespaces."""
    _remove_abandoned()
    bridge = f"rpb{os.getpid()}"
    # 198.18.0.0/15 is set aside for tests; tests/faults takes the lower half.
    net = f"198.19.{os.getpid() % 250}"
    cables = tuple(
        Cable(f"{_PREFIX}{os.getpid()}-{number}", f"rph{os.getpid()}n{number}", f"{net}.{number + 1}", bridge)
        for number in range(num_hosts)
    )
    try:
        run_ip("link", "add", bridge, "type", "bridge")
        run_ip("addr", "add", f"{net}.254/24", "dev", bridge)
        run_ip("link", "set", bridge, "up")
        for cable in cables:
            _lay(cable)
        yield cables
    finally:
        _remove(bridge, [cable.namespace for cable in cables])


def _lay(cable: Cable) -> None:
    run_ip("netns", "add", cable.namespace)
    run_ip("link", "add", cable.device, "type", "veth", "peer", "name", "host", "netns", cable.namespace)
    run_ip("link", "set", cable.device, "master", cable.bridge, "up")
    run_ip("-n", cable.namespace, "link", "set", "lo", "up")
    run_ip("-n", cable.namespace, "addr", "add", f"{cable.address}/24", "dev", "host")
    run_ip("-n", cable.namespace, "link", "set", "host", "up")


def _remove(bridge: str, namespaces: list[str]) -> None:
    """A veth pair goes with the namespace that one of its ends is in."""
    for arguments in [("link", "del", bridge), *(("netns", "del", name) for name in namespaces)]:
        with contextlib.suppress(NoNamespaces):
            run_ip(*arguments)


def _remove_abandoned() -> None:
    """Remove the namespaces of test runs that were killed."""
    for name in run_ip("netns", "list").split():
        found = re.fullmatch(rf"{_PREFIX}(\d+)-\d+", name)
        if found is not None and not Path("/proc", found[1]).exists():
            _remove(f"rpb{found[1]}", [name])
