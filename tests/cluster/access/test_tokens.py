"""Tests of cluster/access/access_control.py, cluster/access/caller.py."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.access.access_control import AccessControl
from cluster.access.caller import ANYBODY, Caller, calling_as, current_caller
from cluster.access.tokens import Tokens, hash_token, make_token, read_token_file
from cluster.errors import AllowanceSpent, InvalidConfig, PermissionDenied, Unauthenticated
from cluster.parameters.generation import GenerateRequest
from tests.cluster.access.test_allowance import Clock

SECRET, OTHER_SECRET = make_token(), make_token()


def write(path: Path, *entries: dict[str, Any]) -> Path:
    """The file, with another time than before."""
    path.write_text(yaml.safe_dump({"tokens": list(entries)}))
    stamp = write.next_stamp = getattr(write, "next_stamp", 1_000) + 1  # type: ignore[attr-defined]  # a counter
    os.utime(path, (stamp, stamp))
    return path


def entry(secret: str = SECRET, name: str = "alice", **settings: Any) -> dict[str, Any]:
    return {"name": name, "sha256": hash_token(secret), **settings}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tokens.yaml"


def test_a_token_says_who_calls(path: Path) -> None:
    tokens = Tokens(write(path, entry(), entry(OTHER_SECRET, "ops", admin=True, tenant="t")))
    access = AccessControl(tokens)

    assert access.authenticate(f"Bearer {SECRET}") == Caller("alice", "alice", False, 0, None)
    assert access.authenticate(f"bearer {OTHER_SECRET}".encode()) == Caller("ops", "t", True, 0, None)


@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        f"Basic {SECRET}",
        SECRET,
        f"Bearer {SECRET}x",
        "Bearer \udcff",
        b"Bearer \xff\x00",
    ],
    ids=[
        "none",
        "empty",
        "no token",
        "a space",
        "another scheme",
        "no scheme",
        "too long",
        "a half character",
        "bytes",
    ],
)
def test_whoever_has_no_token_is_refused_with_what_to_do(path: Path, authorization: str | bytes | None) -> None:
    access = AccessControl(Tokens(write(path, entry())))
    with pytest.raises(Unauthenticated, match=r"send the header|send `authorization|ask the operator") as raised:
        access.authenticate(authorization)
    assert SECRET not in str(raised.value)


def test_without_a_file_everybody_is_anybody() -> None:
    assert AccessControl().authenticate(None) is ANYBODY


def test_the_file_is_read_again_when_it_changes(path: Path) -> None:
    clock = Clock()
    tokens = Tokens(write(path, entry()), clock)
    write(path, entry(OTHER_SECRET, "bob"))
    assert tokens.find(SECRET) is not None, "it looks once a second"

    clock.now_s += 1.1
    assert tokens.find(SECRET) is None
    assert tokens.find(OTHER_SECRET) is not None


def test_a_file_that_cannot_be_used_changes_nothing(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    tokens = Tokens(write(path, entry()), clock)
    for content in ("tokens: [{name: 'no hash'}]", "}", "tokens: 3"):
        path.write_text(content)
        clock.now_s += 1.1
        assert tokens.find(SECRET) is not None
    path.unlink()
    clock.now_s += 1.1
    assert tokens.find(SECRET) is not None
    assert [record.message for record in caplog.records] == [
        "cannot read the token file: the earlier tokens stay valid"
    ] * 3


def test_what_runs_counts_over_a_change_of_the_file(path: Path) -> None:
    clock = Clock()
    tokens = Tokens(write(path, entry(concurrent=2)), clock)
    before = tokens.find(SECRET)
    assert before is not None
    before.allowance.begin()
    write(path, entry(concurrent=1))
    clock.now_s += 1.1
    after = tokens.find(SECRET)
    assert after is not None
    with pytest.raises(AllowanceSpent, match="1 requests at once"):
        after.allowance.begin()
    before.allowance.end()
    after.allowance.begin()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("tokens: [{name: a/b, sha256: x}]", "tokens.0.name"),
        ("tokens: [{name: a, sha256: x}]", "tokens.0.sha256"),
        (yaml.safe_dump({"tokens": [entry(), entry(OTHER_SECRET)]}), "'alice' is there twice"),
        (yaml.safe_dump({"tokens": [entry(), entry(name="b")]}), "is there twice"),
        (yaml.safe_dump({"tokens": [entry(requests_per_s=0)]}), "requests_per_s"),
        (yaml.safe_dump({"tokens": [entry(password="x")]}), "password"),
        ("[", "is not YAML"),
    ],
)
def test_a_mistake_in_the_file_is_named(path: Path, content: str, message: str) -> None:
    path.write_text(content)
    with pytest.raises(InvalidConfig, match=message):
        read_token_file(path)


def test_priority_has_a_ceiling() -> None:
    low = Caller("batch", "t", highest_priority=5)
    assert (low.priority(0), low.priority(5), low.priority(9)) == (5, 5, 9)
    with pytest.raises(PermissionDenied, match="priority is 4; token 'batch' may have 5 and above"):
        low.priority(4)
    plain = Caller("alice", "t", highest_priority=0)
    assert plain.priority(0) == 0
    with pytest.raises(PermissionDenied):
        plain.priority(-1)
    assert ANYBODY.priority(-7) == -7


def test_adapters_and_administration_are_allowed_by_name() -> None:
    caller = Caller("alice", "t", adapters=frozenset({"french"}))
    assert caller.may_use("french")
    assert not caller.may_use("dutch")
    with pytest.raises(PermissionDenied, match="may not use AdminService"):
        caller.check_administers()
    ANYBODY.check_administers()
    assert ANYBODY.may_use("dutch")


def test_no_tenant_has_another_ones_salt() -> None:
    """A tenant's name has no slash, so that no salt of one reads like another's."""
    alice, bob = Caller("a", "alice"), Caller("b", "bob")
    salts = [caller.salted(salt) for caller in (alice, bob) for salt in ("", "x", "alice/", "bob/", "/bob/")]
    assert len(set(salts)) == len(salts)
    assert all(salt is not None and salt.startswith(("alice/", "bob/")) for salt in salts)
    assert (ANYBODY.salted(""), ANYBODY.salted("x")) == (None, "x")


def test_a_request_is_whose_call_it_was_made_in() -> None:
    alice = Caller("a", "alice")
    with calling_as(alice):
        request = GenerateRequest(prompt=None)
        assert current_caller() is alice
    assert request.caller is alice
    assert GenerateRequest(prompt=None).caller is ANYBODY
