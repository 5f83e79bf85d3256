"""Files of secrets: who may read them, what is in them, and what happens when they change.

Tests of kv_transfer/trust/watched_file.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kv_transfer.errors import SecretUnusable
from kv_transfer.trust.secret import ClusterSecret, Purpose
from kv_transfer.trust.secret_file import FileSecrets, read_secret_file

OLD, NEW = ClusterSecret(bytes([1]) * 32), ClusterSecret(bytes([2]) * 32)


def write(path: Path, *secrets: ClusterSecret, mode: int = 0o600) -> Path:
    path.write_text("# the cluster's\n\n" + "".join(f"{secret.reveal().hex()}\n" for secret in secrets))
    path.chmod(mode)
    return path


def keys_of(*secrets: ClusterSecret) -> tuple[bytes, ...]:
    return tuple(secret.key(Purpose.SESSION) for secret in secrets)


def test_the_first_line_is_the_current_secret_and_the_others_are_accepted(tmp_path: Path) -> None:
    assert read_secret_file(write(tmp_path / "secrets", NEW, OLD)) == [NEW, OLD]


@pytest.mark.parametrize("mode", [0o604, 0o620, 0o666, 0o602])
def test_a_file_that_others_can_use_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(SecretUnusable, match=f"has mode {mode:04o}, so others can use it; chmod 0600"):
        read_secret_file(write(tmp_path / "secrets", NEW, mode=mode))


def test_a_group_may_read_it_as_kubernetes_lets_it(tmp_path: Path) -> None:
    assert read_secret_file(write(tmp_path / "secrets", NEW, mode=0o440)) == [NEW]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "has 0 secrets"),
        (b"abcd\n", "line 1 is not 64 hexadecimal digits"),
        (b"# one\n" + b"g" * 64, "line 2 is not 64 hexadecimal digits"),
        (b"\xff\xfe" * 40, "line 1 is not"),
        (b"0" * 70_000, "is larger than"),
        (b"\n".join([b"%064x" % number for number in range(9)]), "has 9 secrets"),
    ],
)
def test_a_file_with_something_else_is_refused_without_its_content(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "secrets"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(SecretUnusable, match=says) as refused:
        read_secret_file(path)
    assert "abcd" not in str(refused.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SecretUnusable, match=r"nowhere: cannot be read: No such file"):
        FileSecrets(tmp_path / "nowhere")


def test_a_changed_file_is_followed_within_a_second_and_a_broken_one_is_not(tmp_path: Path) -> None:
    now_s = 0.0
    path = write(tmp_path / "secrets", OLD)
    secrets = FileSecrets(path, lambda: now_s)
    assert secrets.keys(Purpose.SESSION) == keys_of(OLD)
    write(path, NEW, OLD)
    now_s = 1.0
    assert secrets.keys(Purpose.SESSION) == keys_of(NEW, OLD)
    path.write_text("nothing\n")
    now_s = 2.0
    assert secrets.keys(Purpose.SESSION) == keys_of(NEW, OLD)
    path.unlink()
    now_s = 3.0
    assert secrets.keys(Purpose.SESSION) == keys_of(NEW, OLD)
    write(path, NEW)
    now_s = 4.0
    assert secrets.keys(Purpose.SESSION) == keys_of(NEW)
