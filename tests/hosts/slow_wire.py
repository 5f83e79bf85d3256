"""A wire in user space between two TAP devices: as slow, narrow and lossy as it is told to be.

It is a process of its own (not every kernel has netem), which ends, and its devices with it, with its standard input.
Each line of input sets the wire: the delay in seconds, the share of frames that is lost, and the rate in bytes per
second. Both directions are alike.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import itertools
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from tests.faults.two_hosts import NoNamespaces, run_ip
from tests.hosts.network import Cable

_TUNSETIFF: Final = 0x400454CA
_IFF_TAP: Final = 0x0002
_IFF_NO_PI: Final = 0x1000
_STDIN: Final = 0
_MAX_FRAME_BYTES: Final = 65_536
_MAX_QUEUE_S: Final = 0.2
"""A frame that would wait longer for its turn is dropped, as a switch does."""
_START_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Wire:
    """The properties of a wire, in each direction. rate: bytes per second."""

    delay_s: float = 0.0
    loss: float = 0.0
    rate: float = 1e9


class SlowCable:
    """The wire that a host's cable was replaced with."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def become(self, wire: Wire) -> None:
        """Like this, for frames that come from now on."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{wire.delay_s} {wire.loss} {wire.rate}\n")
        self._process.stdin.flush()


@contextlib.contextmanager
def slowed(cable: Cable) -> Iterator[SlowCable]:
    """Replace the cable of a host that is off; at first nothing is slow. Raises NoNamespaces."""
    inner, outer = f"{cable.device}i", f"{cable.device}o"
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.hosts.slow_wire", inner, outer],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        ready, _, _ = select.select([process.stdout], [], [], _START_TIMEOUT_S)
        if not ready or process.stdout.readline() != "ready\n":
            raise NoNamespaces("no TAP devices can be made")
        _replace(cable, inner, outer)
        yield SlowCable(process)
    finally:
        process.stdin.close()
        process.wait(_START_TIMEOUT_S)
        process.stdout.close()
        with contextlib.suppress(NoNamespaces):
            run_ip("-n", cable.namespace, "addr", "add", f"{cable.address}/24", "dev", "host")


def _replace(cable: Cable, inner: str, outer: str) -> None:
    """The neighbours know the host by the address of its old device: the new one takes it over."""
    mac = run_ip("-n", cable.namespace, "-brief", "link", "show", "host").split()[2]
    run_ip("-n", cable.namespace, "addr", "del", f"{cable.address}/24", "dev", "host")
    run_ip("link", "set", inner, "netns", cable.namespace, "address", mac)
    run_ip("-n", cable.namespace, "addr", "add", f"{cable.address}/24", "dev", inner)
    run_ip("-n", cable.namespace, "link", "set", inner, "up")
    run_ip("link", "set", outer, "master", cable.bridge, "up")


class _Relay:
    """fds: of the two devices; what is read from the one is written to the other when its time has come."""

    def __init__(self, fds: tuple[int, int]) -> None:
        self._peers = {fds[0]: fds[1], fds[1]: fds[0]}
        self._free_at_s = dict.fromkeys(fds, 0.0)
        self._queue: list[tuple[float, int, int, bytes]] = []
        self._numbers = itertools.count()
        self._random = random.Random(1)
        self._wire = Wire()

    def run(self) -> None:
        """Until the end of standard input."""
        while True:
            wait_s = max(0.0, self._queue[0][0] - time.monotonic()) if self._queue else None
            readable, _, _ = select.select([*self._peers, _STDIN], [], [], wait_s)
            self._deliver()
            for source in readable:
                if source != _STDIN:
                    self._take(source)
                elif line := sys.stdin.readline():
                    self._wire = Wire(*map(float, line.split()))
                else:
                    return

    def _take(self, source: int) -> None:
        frame = os.read(source, _MAX_FRAME_BYTES)
        now_s, wire = time.monotonic(), self._wire
        begin_s = max(now_s, self._free_at_s[source])
        if begin_s - now_s > _MAX_QUEUE_S or self._random.random() < wire.loss:
            return
        self._free_at_s[source] = begin_s + len(frame) / wire.rate
        due_s = self._free_at_s[source] + wire.delay_s
        heapq.heappush(self._queue, (due_s, next(self._numbers), self._peers[source], frame))

    def _deliver(self) -> None:
        while self._queue and self._queue[0][0] <= time.monotonic():
            _, _, target, frame = heapq.heappop(self._queue)
            # A device that is not up yet takes nothing.
            with contextlib.suppress(OSError):
                os.write(target, frame)


def _open_tap(name: str) -> int:
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return fd


def main() -> None:
    relay = _Relay((_open_tap(sys.argv[1]), _open_tap(sys.argv[2])))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    relay.run()


if __name__ == "__main__":
    main()
