from __future__ import annotations

import logging
from pathlib import Path

import pytest

from actors.errors import InvalidRecording
from actors.recording.recording_file import MAX_RECORD_BYTES, RecordingFile, read_records


def test_records_come_back_in_order_and_only_this_user_reads_them(tmp_path: Path) -> None:
    file = RecordingFile(tmp_path / "made", "engine-prefill-0-1", 1000)
    for record in (b"one", b"", b"three"):
        file.write(record)
    file.close()
    file.write(b"too late")
    assert list(read_records(file.path)) == [b"one", b"", b"three"]
    assert file.path.stat().st_mode & 0o777 == 0o600
    assert file.path.name.startswith("engine-prefill-0-1-")


def test_a_recording_ends_before_the_record_that_does_not_fit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    file = RecordingFile(tmp_path, "engine", 20)
    for record in (b"123456", b"123456", b"1"):
        file.write(record)
    assert not file.is_open
    assert list(read_records(file.path)) == [b"123456", b"123456"]
    assert [record.message for record in caplog.records] == [
        "the recording of decisions has reached its largest size and ends"
    ]


def test_a_disk_that_refuses_ends_the_recording_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = RecordingFile(tmp_path, "engine", 1 << 30)
    assert file._file is not None
    file._file.close()

    class Full:
        def write(self, data: bytes) -> int:
            raise OSError(28, "No space left on device")

    file._file = Full()  # type: ignore[assignment]  # It has all that is called here.
    file.write(b"a record")
    assert not file.is_open
    assert caplog.records[0].message == "the recording of decisions cannot be written and ends"
    file.close()


def test_a_last_record_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    file = RecordingFile(tmp_path, "engine", 1000)
    file.write(b"whole")
    file.write(b"killed meanwhile")
    file.close()
    for num_bytes in range(10, file.path.stat().st_size):
        cut = tmp_path / "cut"
        cut.write_bytes(file.path.read_bytes()[:num_bytes])
        assert list(read_records(cut)) == [b"whole"]


def test_what_is_no_recording_is_refused_with_its_name(tmp_path: Path) -> None:
    missing, other = tmp_path / "missing", tmp_path / "other"
    other.write_bytes((MAX_RECORD_BYTES + 1).to_bytes(4, "little") + b"x")
    with pytest.raises(InvalidRecording, match=r"missing: it cannot be read: No such file"):
        list(read_records(missing))
    with pytest.raises(InvalidRecording, match=r"other: a record of 67108865 bytes is longer than 67108864"):
        list(read_records(other))
