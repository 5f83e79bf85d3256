"""Decides where the live page is served, and where it is off."""

from __future__ import annotations

from collections.abc import Iterable

from cluster.api.protos.loopback_addresses import is_loopback
from cluster.settings.http import HttpConfig
from cluster.settings.ingress import IngressConfig


def why_off(host: str, *, asks_for_tokens: bool, has_other_port: bool) -> str:
    """Return why a server must not answer with the page; "" if it may.

    host:            the address that the server listens at
    has_other_port:  whether the operators' API has a port of its own, which is another one
    """
    if has_other_port:
        return (
            "the live page is not served on this port, because ingress.admin_port is set: set ingress.http.admin_port, "
            "and open /ui there"
        )
    if not asks_for_tokens and not is_loopback(host):
        return (
            f"the live page is off, because this ingress listens beyond loopback (ingress.host: {host}) and asks for "
            "no tokens: set ingress.tokens, or listen on loopback"
        )
    return ""


def page_lines(ingress: IngressConfig, http_addresses: Iterable[str]) -> list[str]:
    """Return lines that tell who starts a cluster where its live page is, or why it is off.

    http_addresses: of the ingresses' HTTP API, as host:port
    """
    http = ingress.http
    if http is None:
        return []
    reason = why_off(
        ingress.host,
        asks_for_tokens=ingress.tokens is not None,
        has_other_port=ingress.admin_port is not None and http.admin_port is None,
    )
    if reason:
        return [reason]
    if http.admin_port == 0:
        return ["live page: /ui at a free port of each ingress, for operators"]
    scheme = "http" if ingress.tls is None else "https"
    return [f"live page: {scheme}://{_page_address(address, http)}/ui" for address in http_addresses]


def _page_address(http_address: str, http: HttpConfig) -> str:
    """Return where an ingress has its page. A port for operators moves as far as the one beside it does."""
    if http.admin_port is None:
        return http_address
    host, _, port = http_address.rpartition(":")
    return f"{host}:{http.admin_port + (int(port) - http.port if http.port else 0)}"
