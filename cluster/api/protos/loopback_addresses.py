"""The test for addresses of the host itself: tokens go there, and servers listen there, without encryption."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether only this host can reach a server that listens at this address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False  # A name: whatever it stands for, somewhere else it may stand for something else.
