"""Whether this machine has IPv6, at least to itself."""

from __future__ import annotations

import socket


def has_ipv6() -> bool:
    """A test that needs ::1 skips itself without it."""
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False
