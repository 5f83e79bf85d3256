"""The test for loopback addresses, which tokens may be sent to, and servers may listen at, without encryption."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether only this host can reach a server that listens at this address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False  # A name other than localhost may resolve to another host elsewhere.
