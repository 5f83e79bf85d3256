"""Tests of cluster/access/server_tls.py."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from cluster.access.certificate_dates import find_certificate_warnings
from cluster.access.server_tls import ServerTls, TlsConfig
from tests.cluster.access.certificates import Authority

BEGINS, ENDS = datetime(2020, 1, 1, tzinfo=UTC), datetime(2100, 1, 1, tzinfo=UTC)


@pytest.fixture
def tls(tmp_path: Path) -> TlsConfig:
    """Valid from BEGINS to ENDS."""
    authority = Authority(tmp_path, "root")
    files = authority.certify("server")
    return TlsConfig(certificate=files.certificate, key=files.key, client_ca=authority.root)


def test_nothing_is_said_of_certificates_that_last(tls: TlsConfig) -> None:
    assert find_certificate_warnings(None) == []
    assert find_certificate_warnings(tls) == []
    assert find_certificate_warnings(tls, ENDS - timedelta(days=15)) == []


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (BEGINS - timedelta(days=1), "is valid only from 2020-01-01 00:00 UTC on: clients refuse it until then"),
        (ENDS - timedelta(days=13), "expires at 2100-01-01 00:00 UTC"),
        (ENDS + timedelta(seconds=1), "expired at 2100-01-01 00:00 UTC: clients refuse it"),
    ],
)
def test_dates_that_clients_mind_are_said_for_each_file(tls: TlsConfig, now: datetime, said: str) -> None:
    assert find_certificate_warnings(tls, now) == [
        f"ingress.tls.certificate {tls.certificate}: CN=server {said}",
        f"ingress.tls.client_ca {tls.client_ca}: CN=root {said}",
    ]


def test_the_end_of_what_is_in_use_can_be_watched(tls: TlsConfig) -> None:
    assert ServerTls(tls).ends_at_s == ENDS.timestamp()


def test_a_file_without_a_certificate_is_left_to_the_check_of_the_files(tls: TlsConfig, tmp_path: Path) -> None:
    empty = tmp_path / "empty.pem"
    empty.write_text("")
    assert find_certificate_warnings(tls.model_copy(update={"certificate": empty, "client_ca": None})) == []
