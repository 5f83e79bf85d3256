"""Answers calls that are cheap and frequent where they are parsed, without a task and an application.

An endpoint picker reads an ingress's load twenty times a second. The application costs five times as much as the load's
text does, so a connection asks here first. Only a call that the application would answer with 200 and this text is
answered here; any other one, for whatever reason, goes to the application, which knows how to refuse it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias

from cluster.access.access_control import AccessControl
from cluster.access.caller import Caller
from cluster.api.http.receiving.hosts import AllowedHosts
from cluster.errors import ClusterError

Maker: TypeAlias = Callable[[Caller], bytes | None]
"""Returns the body for a caller; None if the application has to answer."""

_SPECIAL: Final = frozenset({b"content-length", b"transfer-encoding", b"expect", b"upgrade", b"origin"})
"""Headers of calls that have a body, or that only the application knows how to answer."""


class InstantAnswers:
    """The calls of one server that are answered at once."""

    def __init__(
        self,
        access: AccessControl,
        hosts: AllowedHosts,
        makers: Mapping[str, Maker],
        content_type: str,
        on_answer: Callable[[str, int], None],
    ) -> None:
        """Keep what decides.

        hosts:     the hosts that calls may name
        makers:    make the bodies of GET calls, by their path
        on_answer: is called with each answer's path and status
        """
        self._access = access
        self._hosts = hosts
        self._makers = {path.encode(): (path, maker) for path, maker in makers.items()}
        self._type = b"content-type: %b\r\n\r\n" % content_type.encode()
        self._on_answer = on_answer

    def answer(
        self, url: bytes, headers: Sequence[tuple[bytes, bytes]], default_headers: Sequence[tuple[bytes, bytes]]
    ) -> bytes | None:
        """Return the whole answer to a GET call; None if the application has to answer.

        url:             as it was sent
        headers:         the call's, with names in lower case
        default_headers: those that every answer has
        """
        if (known := self._makers.get(url)) is None:
            return None
        host = authorization = None
        for name, value in headers:
            if name in _SPECIAL:
                return None
            if name == b"host" and host is None:
                host = value.decode("latin-1")
            elif name == b"authorization" and authorization is None:
                authorization = value.decode("latin-1")
        if not self._hosts.allows(host):
            return None
        try:
            caller = self._access.authenticate(authorization)
        except ClusterError:
            return None
        path, make = known
        if (body := make(caller)) is None:
            return None
        self._on_answer(path, 200)
        head = b"".join([b"%b: %b\r\n" % header for header in default_headers])
        return b"HTTP/1.1 200 OK\r\n%bcontent-length: %d\r\n%b%b" % (head, len(body), self._type, body)
