"""Tests of cluster/commands/simulate/replay_command.py and cluster/simulation/replays.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from actors.recording.engine_events import CODEC, Added
from actors.recording.recording_file import RecordingFile, read_records
from cluster.cli import app
from tests.actors.core.builders import make_request
from tests.actors.recording.recorded_run import RecordedRun
from tests.cluster.routing.cost_setup import engine, request
from tests.cluster.routing.recording.recorded_cluster import RecordedCluster


def _replay(*paths: Path) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["replay", *map(str, paths)])


@pytest.fixture
def recordings(tmp_path: Path) -> Path:
    """A directory with the recording of an engine and that of an ingress."""
    directory = tmp_path / "recorded"
    run = RecordedRun(directory)
    run.scheduler.add_request(make_request("r", 10))
    run.run()
    run.scheduler.shutdown()
    cluster = RecordedCluster(directory, engine("both-0"))
    cluster.send(request())
    cluster.recorder.close()
    return directory


def test_all_recordings_of_a_directory_are_replayed(recordings: Path) -> None:
    result = _replay(recordings)
    assert result.exit_code == 0, result.output
    assert "both-0 (3)" in result.output
    assert "ingress node-1" in result.output
    assert result.output.count("equal") == 2


def test_a_decision_that_differs_ends_the_command_with_an_error(recordings: Path) -> None:
    path = next(recordings.glob("engine*"))
    events = [CODEC.decode(record) for record in read_records(path)]
    file = RecordingFile(recordings, "changed", 1 << 20)
    for event in events:
        if not isinstance(event, Added):
            file.write(CODEC.encode(event))
    file.close()
    result = _replay(recordings)
    assert result.exit_code == 1
    assert "step 0: the batch and new requests; the recorded step computes 8 tokens" in result.stderr


def test_what_cannot_be_replayed_is_named(recordings: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "nothing").write_bytes(b"")
    (tmp_path / "noise").write_bytes(b"\x02\x00\x00\x00ab")
    for path, message in (
        (tmp_path / "empty", "there is no file *.decisions"),
        (tmp_path / "nothing", "it has no record"),
        (tmp_path / "noise", "record 1 is no record of an ingress"),
        (tmp_path / "missing", "it cannot be read: No such file or directory"),
    ):
        result = _replay(path)
        assert result.exit_code == 1
        assert message in result.stderr.replace("\n", " ")
        assert path.name in result.stderr
