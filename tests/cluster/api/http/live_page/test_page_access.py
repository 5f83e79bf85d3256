"""The start of a cluster says where its live page is, or why there is none."""

from __future__ import annotations

import pytest

from cluster.api.http.live_page.page_access import page_lines
from cluster.settings.ingress import IngressConfig

_TWO = ["127.0.0.1:8000", "127.0.0.1:8001"]


@pytest.mark.parametrize(
    ("settings", "addresses", "lines"),
    [
        ({}, _TWO, ["live page: http://127.0.0.1:8000/ui", "live page: http://127.0.0.1:8001/ui"]),
        (
            {"admin_port": 50151, "http": {"port": 8000, "admin_port": 8100}},
            _TWO,
            ["live page: http://127.0.0.1:8100/ui", "live page: http://127.0.0.1:8101/ui"],
        ),
        ({"http": {"port": 0, "admin_port": 8100}}, ["127.0.0.1:4711"], ["live page: http://127.0.0.1:8100/ui"]),
        ({"http": {"admin_port": 0}}, _TWO, ["live page: /ui at a free port of each ingress, for operators"]),
    ],
)
def test_each_address_of_the_page_is_told(settings: dict[str, object], addresses: list[str], lines: list[str]) -> None:
    assert page_lines(IngressConfig.model_validate(settings), addresses) == lines


@pytest.mark.parametrize(
    ("settings", "setting"),
    [
        ({"admin_port": 50151}, "ingress.http.admin_port"),
        ({"host": "0.0.0.0", "insecure": True}, "ingress.tokens"),
        ({"host": "0.0.0.0", "insecure": True, "http": {"admin_port": 8100}}, "ingress.tokens"),
    ],
)
def test_a_page_that_is_off_is_told_with_the_setting_that_helps(settings: dict[str, object], setting: str) -> None:
    [line] = page_lines(IngressConfig.model_validate(settings), ["10.0.0.1:8000"])
    assert "the live page is " in line
    assert setting in line


def test_without_http_nothing_is_told() -> None:
    assert page_lines(IngressConfig.model_validate({"http": None}), []) == []
