"""A process's set of the cluster's secrets, and how it takes newer ones."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from kv_transfer.errors import SecretUnusable, Untrusted
from kv_transfer.trust.membership import Trust, TrustMaterial
from kv_transfer.trust.secret import ClusterSecret, Purpose

OLD, NEW = ClusterSecret(bytes([1]) * 32), ClusterSecret(bytes([2]) * 32)


def material(generation: int, *secrets: ClusterSecret) -> TrustMaterial:
    return TrustMaterial(generation, tuple(secret.reveal() for secret in secrets))


def test_a_process_that_was_given_nothing_proves_nothing_and_accepts_nobody() -> None:
    trust = Trust()
    assert (trust.material, trust.generation) == (None, 0)
    with pytest.raises(Untrusted, match="has not been given the cluster's secret"):
        trust.keys(Purpose.SESSION)


def test_newer_material_replaces_older_and_late_messages_do_not_bring_that_back() -> None:
    trust = Trust(material(1, OLD))
    trust.use(material(3, NEW))
    trust.use(material(2, NEW, OLD))
    assert trust.keys(Purpose.SESSION) == (NEW.key(Purpose.SESSION),)
    assert trust.generation == 3


def test_material_does_not_show_its_secrets_but_travels() -> None:
    given = material(1, OLD)
    assert repr(given) == "TrustMaterial(generation=1, secret_file='', block_hash_key_file='', tls=None)"
    assert pickle.loads(pickle.dumps(given)) == given


def test_who_follows_hears_what_is_here_and_what_comes() -> None:
    trust, heard = Trust(material(1, OLD)), list[int]()
    trust.follow(lambda given: heard.append(given.generation))
    trust.use(material(2, NEW, OLD))
    trust.use(material(2, NEW, OLD))
    assert heard == [1, 2]


def test_a_generation_is_settled_once_those_that_get_it_from_here_have_it() -> None:
    trust = Trust(material(1, OLD))
    trust.note_other("rank 1", 1)
    trust.use(material(2, NEW, OLD))
    assert (trust.generation, trust.settled_generation) == (2, 1)
    trust.note_other("rank 1", 2)
    assert trust.settled_generation == 2


def test_a_file_is_read_where_the_process_is(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    with pytest.raises(SecretUnusable, match="cannot be read"):
        Trust(TrustMaterial(1, secret_file=str(path)))
    path.write_text(OLD.reveal().hex())
    path.chmod(0o600)
    assert Trust(TrustMaterial(1, secret_file=str(path))).keys(Purpose.RANK) == (OLD.key(Purpose.RANK),)
