"""Ports for servers of tests that other processes start later."""

from __future__ import annotations

import random
import socket
from typing import Final

# Neither Ray's workers' (10002 to 19999) nor those that Linux gives to connections: one of these might be taken by the
# time that the server starts.
_PORTS: Final = range(20_000, 32_768)


def free_port() -> int:
    """One that nobody listens at, at any address of this machine."""
    # Not hypothesis's or a test's own seed: processes of tests side by side draw different ones.
    draw = random.SystemRandom()
    while True:
        port = draw.choice(_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
