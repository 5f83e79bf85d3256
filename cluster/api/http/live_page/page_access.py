"""Decides where the live page is served, and where it is off."""

from __future__ import annotations

from cluster.api.protos.loopback_addresses import is_loopback


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
