"""Checks the host that a call names: it has to be a name of this ingress.

A web page can make its browser call 127.0.0.1 by a host name of the page's owner, which resolves to that address (DNS
rebinding). The page can then read the answers, because the browser takes them for answers of the page's own host. Only
the header `host` shows that such a call is meant for another host. Addresses and localhost cannot be abused in this
way: they are always allowed, and port-forwards and probes need them.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.api.http.errors import refused
from cluster.api.protos.loopback_addresses import is_loopback

ANY_HOST: Final = "*"


class AllowedHosts:
    """The host names that calls may have. Ports are ignored, because proxies and port-forwards have other ports."""

    def __init__(self, names: Sequence[str]) -> None:
        """Keep the names: host names, addresses, `*.example.org` for all names below one, or "*" for any host."""
        self._names = frozenset(name.lower().strip("[]").rstrip(".") for name in names)
        self._parents = tuple(name.removeprefix("*") for name in self._names if name.startswith("*."))

    @classmethod
    def of_server(cls, host: str, configured: Sequence[str] | None, *, asks_for_tokens: bool) -> AllowedHosts:
        """Return the hosts of a server.

        These are the configured ones. By default they are the server's own name and address if it listens on loopback
        and asks for no tokens, otherwise any host.
        host: the address that the server listens at
        """
        if configured is not None:
            return cls(configured)
        if asks_for_tokens or not is_loopback(host):
            return cls((ANY_HOST,))
        return cls((host, socket.gethostname()))

    def allows(self, host: str | None) -> bool:
        """Whether a call's header `host` is allowed. None is allowed, because browsers always send the header."""
        if host is None or ANY_HOST in self._names:
            return True
        name = _name_in(host)
        is_local = name == "localhost" or name.endswith(".localhost")
        return is_local or name in self._names or name.endswith(self._parents) or _is_address(name)


class HostCheck:
    """Middleware that refuses calls for other hosts, apart from probes, which may name any host."""

    def __init__(self, app: ASGIApp, allowed: AllowedHosts, open_paths: frozenset[str]) -> None:
        """Wrap an application. open_paths: the paths that are answered whatever host a call names"""
        self._app = app
        self._allowed = allowed
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one call."""
        host = Headers(scope=scope).get("host")
        if scope["path"] in self._open_paths or self._allowed.allows(host):
            await self._app(scope, receive, send)
            return
        message = (
            f"the call is for host {host!r:.300}, which this ingress does not know as its own; call it by an address "
            "of its own, or name the host in its setting ingress.allowed_hosts"
        )
        await refused(421, message, "host_not_allowed").response()(scope, receive, send)


def _name_in(host: str) -> str:
    """Return a host header's name without its port."""
    name, separator, port = host.rpartition(":")
    has_port = bool(separator) and port.isdigit() and (not host.startswith("[") or name.endswith("]"))
    return (name if has_port else host).lower().strip("[]").rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
