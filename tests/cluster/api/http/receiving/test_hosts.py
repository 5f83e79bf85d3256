"""Calls are for hosts by which this server is known.

Tests of cluster/api/protos/loopback_addresses.py.
"""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import yaml

from cluster.access.access_control import AccessControl
from cluster.access.tokens import Tokens, hash_token
from cluster.api.http.receiving.hosts import AllowedHosts
from tests.cluster.api.http.http_setup import http_setup

OWN = AllowedHosts.of_server("127.0.0.1", None, asks_for_tokens=False)


@pytest.mark.parametrize(
    ("host", "is_allowed"),
    [
        ("localhost", True),
        ("LOCALHOST.:8000", True),
        ("raypd.localhost:8000", True),
        ("127.0.0.1:8000", True),
        ("127.8.0.1", True),
        ("[::1]:8000", True),
        ("[::1]", True),
        ("10.1.2.3:8000", True),
        ("127.0.0.1.:8000", True),
        ("0x7f.1:8000", False),
        ("127.1", False),
        (socket.gethostname(), True),
        (None, True),
        ("evil.example.org:8000", False),
        ("localhost.example.org", False),
        ("127.0.0.1.example.org", False),
        ("notlocalhost", False),
        ("", False),
        ("a:b:c", False),
    ],
)
def test_on_loopback_without_tokens_a_server_knows_its_own_names_and_addresses(
    host: str | None, is_allowed: bool
) -> None:
    assert OWN.allows(host) is is_allowed


@pytest.mark.parametrize(("host", "asks_for_tokens"), [("0.0.0.0", False), ("127.0.0.1", True), ("::", True)])
def test_beyond_loopback_and_with_tokens_any_host_is_allowed(host: str, asks_for_tokens: bool) -> None:
    assert AllowedHosts.of_server(host, None, asks_for_tokens=asks_for_tokens).allows("evil.example.org")


@pytest.mark.parametrize(
    ("host", "is_allowed"),
    [
        ("chat.example.org", True),
        ("chat.example.org:443", True),
        ("a.example.com", True),
        ("a.b.example.com", True),
        ("example.com", False),
        ("badexample.com", False),
        ("localhost:8000", True),
        ("other.example.org", False),
    ],
)
def test_configured_hosts_are_allowed_and_no_others(host: str, is_allowed: bool) -> None:
    hosts = AllowedHosts.of_server("0.0.0.0", ("Chat.example.org", "*.example.com"), asks_for_tokens=True)
    assert hosts.allows(host) is is_allowed


async def test_a_call_for_another_host_is_told_which_setting_allows_it() -> None:
    async with http_setup() as setup:
        for path in ("/v1/models", "/nothing", "/docs"):
            answer = await setup.http.get(path, headers={"host": "evil.example.org"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (421, "host_not_allowed")
            assert "ingress.allowed_hosts" in answer.json()["error"]["message"]
        for path in ("/health", "/ready", "/ping"):
            assert (await setup.http.get(path, headers={"host": "evil.example.org"})).status_code == 200


async def test_an_allowed_host_is_served() -> None:
    async with http_setup(allowed_hosts=("chat.example.org",)) as setup:
        assert (await setup.http.get("/v1/models", headers={"host": "chat.example.org"})).status_code == 200
        assert (await setup.http.get("/v1/models")).status_code == 200, "an address"


async def test_with_tokens_a_page_that_rebinds_a_name_gets_nothing_without_one(tmp_path: Path) -> None:
    """Browsers add no token by themselves, as they do cookies; so calls for any host are answered alike."""
    file = tmp_path / "tokens.yaml"
    file.write_text(yaml.safe_dump({"tokens": [{"name": "alice", "sha256": hash_token("secret")}]}))
    async with http_setup(access=AccessControl(Tokens(file))) as setup:
        for host in ("evil.example.org", f"127.0.0.1:{setup.port}"):
            for path in ("/v1/models", "/version", "/metrics", "/nothing"):
                answer = await setup.http.get(path, headers={"host": host})
                assert answer.status_code == 401
        allowed = {"host": "evil.example.org", "authorization": "Bearer secret"}
        assert (await setup.http.get("/v1/models", headers=allowed)).status_code == 200
