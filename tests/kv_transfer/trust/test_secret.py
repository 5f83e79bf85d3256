"""Secrets hide themselves, and give each purpose a key of its own."""

from __future__ import annotations

import pickle

import pytest

from kv_transfer.trust.secret import MAX_ACCEPTED, ClusterSecret, ClusterSecrets, Purpose, SessionKey


def test_neither_repr_nor_str_nor_pickle_tells_a_secret() -> None:
    secret = ClusterSecret(bytes(range(32)))
    key = SessionKey(bytes(range(32)))
    shown = f"{secret!r} {secret} {ClusterSecrets([secret])!r} {key!r} {key}"
    assert shown == "ClusterSecret(hidden) ClusterSecret(hidden) ClusterSecrets(1 hidden) " + " ".join(
        ["SessionKey(hidden)"] * 2
    )
    for hidden in (secret, ClusterSecrets([secret]), key):
        with pytest.raises(TypeError, match="not pickled"):
            pickle.dumps(hidden)


def test_each_purpose_has_a_key_of_its_own_and_none_is_the_secret() -> None:
    secret = ClusterSecret(bytes(range(32)))
    keys = {secret.key(purpose) for purpose in Purpose}
    assert len(keys) == len(Purpose)
    assert secret.reveal() not in keys
    assert keys == {ClusterSecret(bytes(range(32))).key(purpose) for purpose in Purpose}


def test_drawn_secrets_differ() -> None:
    assert len({ClusterSecret.draw() for _ in range(100)}) == 100


def test_a_secret_has_32_bytes_and_a_bounded_number_is_accepted() -> None:
    with pytest.raises(ValueError, match="has 32 bytes, not 16"):
        ClusterSecret(bytes(16))
    for num_secrets in (0, MAX_ACCEPTED + 1):
        with pytest.raises(ValueError, match="can be accepted at a time"):
            ClusterSecrets([ClusterSecret.draw() for _ in range(num_secrets)])


def test_replaced_secrets_are_the_keys_from_then_on() -> None:
    old, new = ClusterSecret.draw(), ClusterSecret.draw()
    secrets = ClusterSecrets([old])
    secrets.replace([new, old])
    assert secrets.keys(Purpose.SESSION) == (new.key(Purpose.SESSION), old.key(Purpose.SESSION))
    assert secrets.accepted == (new, old)
