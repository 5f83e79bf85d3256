"""Which hosts a call may be for: those by which this ingress is known.

A web page of anybody can have its browser call 127.0.0.1 by a name of its own, which resolves to that address (DNS
rebinding), and then reads the answers: for the browser they are of the page's own host. Only the header `host` tells
that such a call is for another host than this one. Addresses cannot be abused so, nor can localhost: these are always
allowed, which is what port-forwards and probes need.
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
    """The names of a server. Ports do not matter: proxies and port-forwards have ports of their own."""

    def __init__(self, names: Sequence[str]) -> None:
        """names: host names, addresses, `*.example.org` for all below a name, or "*" for any"""
        self._names = frozenset(name.lower().strip("[]").rstrip(".") for name in names)
        self._parents = tuple(name.removeprefix("*") for name in self._names if name.startswith("*."))

    @classmethod
    def of_server(cls, host: str, configured: Sequence[str] | None, *, asks_for_tokens: bool) -> AllowedHosts:
        """The configured ones. By default, for a server on loopback that asks for no tokens, its own; else any.

        host: where it listens
        """
        if configured is not None:
            return cls(configured)
        if asks_for_tokens or not is_loopback(host):
            return cls((ANY_HOST,))
        return cls((host, socket.gethostname()))

    def allows(self, host: str | None) -> bool:
        """host: a call's header of that name. None is allowed: browsers always send one."""
        if host is None or ANY_HOST in self._names:
            return True
        name = _name_in(host)
        is_local = name == "localhost" or name.endswith(".localhost")
        return is_local or name in self._names or name.endswith(self._parents) or _is_address(name)


class HostCheck:
    """Refuses calls for other hosts, but those that only ask whether the server lives: probes name a pod's address."""

    def __init__(self, app: ASGIApp, allowed: AllowedHosts, open_paths: frozenset[str]) -> None:
        """open_paths: that are answered whatever host is named"""
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
    """Without its port."""
    name, separator, port = host.rpartition(":")
    has_port = bool(separator) and port.isdigit() and (not host.startswith("[") or name.endswith("]"))
    return (name if has_port else host).lower().strip("[]").rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
