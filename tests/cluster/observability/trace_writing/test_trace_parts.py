from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from actors.core.requests.block_hash import PUBLIC_KEY
from cluster.observability.trace_writing.trace_parts import TraceLimits, TraceParts
from cluster.traces.request_trace import BlockHashes, TraceHeader, parse_header

LIMITS = TraceLimits(max_file_bytes=1000, max_files=3)
LINE = b"x" * 499 + b"\n"


def parts_in(folder: Path, hashes: BlockHashes = BlockHashes.NONE, **header: Any) -> TraceParts:
    given: dict[str, Any] = {"began_at_s": 1.7e9, "ingress": "ingress-0", "part": 1} | header
    return TraceParts(folder, TraceHeader(**given, block_hashes=hashes), LIMITS, PUBLIC_KEY)


def write(parts: TraceParts, num_lines: int) -> None:
    for _ in range(num_lines):
        parts.ready()
        parts.append(LINE)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_only_the_owner_may_read_what_is_written(tmp_path: Path) -> None:
    parts = parts_in(tmp_path / "new" / "traces")
    write(parts, 1)
    (file,) = (tmp_path / "new" / "traces").iterdir()
    assert file.name == "requests-ingress-0-20231114T221320-000001.jsonl"
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700


def test_files_are_bounded_in_size_and_number_and_each_begins_with_the_header(tmp_path: Path) -> None:
    parts = parts_in(tmp_path)
    write(parts, 20)
    parts.close()
    assert names(tmp_path) == [f"requests-ingress-0-20231114T221320-{part:06d}.jsonl" for part in (8, 9, 10)]
    for part, name in zip((8, 9, 10), names(tmp_path), strict=True):
        first, *lines = (tmp_path / name).read_bytes().splitlines(keepends=True)
        assert parse_header(first.decode()).part == part
        assert lines == [LINE] * 2
        assert (tmp_path / name).stat().st_size < LIMITS.max_file_bytes + len(LINE)


def test_files_of_earlier_incarnations_count_and_those_of_others_stay(tmp_path: Path) -> None:
    others = ["requests-ingress-1-20200101T000000-000001.jsonl", "notes.txt", "requests-ingress-0.jsonl"]
    for name in [*others, "requests-ingress-0-20200101T000000-000001.jsonl"]:
        (tmp_path / name).touch()
    write(parts_in(tmp_path), 2 * LIMITS.max_files)
    assert set(others) <= set(names(tmp_path))
    assert sum(name.startswith("requests-ingress-0-") for name in names(tmp_path)) == LIMITS.max_files
    assert "requests-ingress-0-20200101T000000-000001.jsonl" not in names(tmp_path)


def test_no_file_and_no_link_that_is_there_is_written_to(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("kept")
    (tmp_path / "requests-ingress-0-20231114T221320-000001.jsonl").symlink_to(target)
    write(parts_in(tmp_path), 1)
    assert target.read_text() == "kept"
    assert "requests-ingress-0-20231114T221320-000002.jsonl" in names(tmp_path)


def test_after_somebody_has_removed_the_file_another_one_is_begun(tmp_path: Path) -> None:
    parts = parts_in(tmp_path)
    write(parts, 1)
    (tmp_path / names(tmp_path)[0]).unlink()
    write(parts, 1)
    assert names(tmp_path) == ["requests-ingress-0-20231114T221320-000002.jsonl"]


def test_each_file_has_a_key_of_its_own_or_all_have_that_of_the_cluster_or_none(tmp_path: Path) -> None:
    def keys(hashes: BlockHashes) -> list[Any]:
        parts, found = parts_in(tmp_path / hashes.value, hashes), []
        for _ in range(4):
            found.append(parts.ready())
            parts.append(LINE)
        return found

    one, same, other, _ = keys(BlockHashes.PER_FILE)
    assert one == same != other
    assert keys(BlockHashes.CLUSTER) == [PUBLIC_KEY] * 4
    assert keys(BlockHashes.NONE) == [None] * 4


def test_a_line_that_does_not_fit_on_the_disk_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = parts_in(tmp_path)
    write(parts, 1)
    real, num_left = os.write, [100]

    def full(fd: int, data: Any) -> int:
        if not num_left[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = real(fd, bytes(data)[: num_left[0]])
        num_left[0] -= written
        return written

    parts.ready()
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space left"):
            parts.append(LINE)
    write(parts, 1)
    parts.close()
    (file,) = tmp_path.iterdir()
    assert file.read_bytes().splitlines(keepends=True)[1:] == [LINE] * 2


def test_a_header_that_does_not_fit_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        parts_in(tmp_path).ready()
    assert names(tmp_path) == []
