"""Tests of actors/recording/scheduler_replay.py, actors/recording/recorded_scheduler.py,
actors/recording/replay.py, actors/recording/engine_events.py and actors/recording/decision_digest.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from actors.core.requests.request import RequestStatus
from actors.core.requests.sampling_params import StructuredOutputParams
from actors.costs.step_cost_model import KINDS, Residuals, StepCostModel
from actors.costs.step_shape import NUM_FEATURES
from actors.errors import DuplicateRequest, IntegrityError, InvalidRecording
from actors.recording.engine_events import CODEC, Added, Aimed, Ended, EngineHeader, Scheduled, TakenIn
from actors.recording.recording_file import RecordingFile, read_records
from actors.recording.replay import Difference
from actors.recording.scheduler_replay import replay_scheduler
from tests.actors.core.builders import make_request
from tests.actors.recording.recorded_run import NUM_BLOCKS, RecordedRun

_MODEL = StepCostModel((1e-3,) * NUM_FEATURES, tuple(Residuals(kind, 100) for kind in KINDS))


def _busy_run(directory: Path) -> RecordedRun:
    """More requests than fit, with chunks, shared prefixes, a deadline, an abort, an aim and a reset."""
    run = RecordedRun(directory)
    shared = list(range(500, 512))
    run.scheduler.chunk_budget.set_aims(0.5)
    for number in range(5):
        request = make_request(f"r{number}", [*shared, 600 + number], max_tokens=12, ignore_eos=True)
        run.scheduler.add_request(request)
    run.scheduler.add_request(make_request("late", 9, deadline_s=1002.0))
    for _ in range(6):
        run.step()
    run.scheduler.finish_requests("r3", RequestStatus.FINISHED_ABORTED)
    run.scheduler.chunk_budget.use_model(_MODEL)
    run.run()
    assert run.scheduler.reset_prefix_cache()
    run.scheduler.add_request(make_request("after", [*shared, 1], max_tokens=2))
    run.run()
    run.scheduler.shutdown()
    return run


def test_a_run_is_decided_again_step_by_step(tmp_path: Path) -> None:
    run = _busy_run(tmp_path)
    stats = run.scheduler.make_stats()
    assert stats.num_preemptions > 0, "the run has preemptions"
    assert stats.prefix_cache_stats.hits > 0, "and prefix hits"
    replay = replay_scheduler(run.path)
    assert replay.difference is None
    assert replay.who == "both-0 (3)"
    assert replay.num_decisions == replay.counts["Scheduled"] + replay.counts["TakenIn"] > 40
    assert replay.counts == {
        "Aimed": 2,
        "Added": 7,
        "Ended": 2,
        "Scheduled": replay.counts["Scheduled"],
        "TakenIn": replay.counts["Scheduled"],
        "Reset": 1,
    }


def test_a_run_with_recurrent_states_is_decided_again(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path, header={"num_state_blocks": 2})
    for number in range(3):
        run.scheduler.add_request(make_request(f"r{number}", 9, max_tokens=8, ignore_eos=True))
    run.run()
    run.scheduler.shutdown()
    assert replay_scheduler(run.path).difference is None

    def forget(events: list[object]) -> None:
        assert isinstance(events[0], EngineHeader)
        events[0] = replace(events[0], num_state_blocks=0)

    assert replay_scheduler(_changed(run, tmp_path, forget)).difference is not None


def _changed(run: RecordedRun, directory: Path, change: object) -> Path:
    """Write the recording once more with its records changed. change: a function of the list of events"""
    events = [CODEC.decode(record) for record in read_records(run.path)]
    assert callable(change)
    change(events)
    file = RecordingFile(directory, "changed", 1 << 20)
    for event in events:
        file.write(CODEC.encode(event))
    file.close()
    return file.path


def test_an_abort_that_is_taken_in_one_step_later_is_found(tmp_path: Path) -> None:
    def change(events: list[object]) -> None:
        at = next(
            index for index, event in enumerate(events) if isinstance(event, Ended) and event.request_ids == ["r3"]
        )
        abort = events.pop(at)
        step = next(index for index in range(at, len(events)) if isinstance(events[index], TakenIn))
        events.insert(step + 1, abort)

    found = replay_scheduler(_changed(_busy_run(tmp_path), tmp_path, change)).difference
    assert found is not None
    assert found.what.startswith("step 6: the batch")
    assert "this one" in found.what


def test_another_time_of_a_step_is_found_where_it_decides(tmp_path: Path) -> None:
    """The deadline of `late` passes while the first steps run: with an earlier clock it does not."""

    def change(events: list[object]) -> None:
        for index, event in enumerate(events):
            if isinstance(event, Scheduled | TakenIn):
                events[index] = replace(event, clock_s=tuple(min(time_s, 1001.0) for time_s in event.clock_s))

    found = replay_scheduler(_changed(_busy_run(tmp_path), tmp_path, change)).difference
    assert found is not None
    assert found.what.startswith("step 3: ended requests;")


def test_a_missing_request_and_another_size_of_the_cache_are_found(tmp_path: Path) -> None:
    run = _busy_run(tmp_path)

    def without_one(events: list[object]) -> None:
        del events[next(index for index, event in enumerate(events) if isinstance(event, Added))]

    def larger(events: list[object]) -> None:
        assert isinstance(events[0], EngineHeader)
        events[0] = replace(events[0], num_blocks=NUM_BLOCKS + 1)

    for change in (without_one, larger):
        assert replay_scheduler(_changed(run, tmp_path, change)).difference is not None


def test_an_aim_that_changes_the_chunks_is_recorded(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    for number in range(3):
        run.scheduler.add_request(make_request(f"r{number}", 10, max_tokens=6, ignore_eos=True))
    run.scheduler.chunk_budget.set_aims(1e-9)
    run.scheduler.chunk_budget.use_model(_MODEL)
    run.run()
    run.scheduler.shutdown()
    assert replay_scheduler(run.path).difference is None

    def without_aim(events: list[object]) -> None:
        at = next(index for index, event in enumerate(events) if isinstance(event, Aimed))
        aimed = events[at]
        assert isinstance(aimed, Aimed)
        events[at] = replace(aimed, itl_s=None)

    found = replay_scheduler(_changed(run, tmp_path, without_aim)).difference
    assert isinstance(found, Difference)
    assert "the batch" in found.what


def test_a_duplicate_request_is_refused_again(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    run.scheduler.add_request(make_request("r"))
    with pytest.raises(DuplicateRequest):
        run.scheduler.add_request(make_request("r"))
    run.run()
    run.scheduler.shutdown()
    assert replay_scheduler(run.path).difference is None


def test_a_step_that_broke_the_scheduler_breaks_it_again(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    run.scheduler.add_request(make_request("r", 4))
    output = run.scheduler.schedule()
    results = run.worker.execute(output)
    results.token_ids[:] = -1
    with pytest.raises(IntegrityError):
        run.scheduler.update_from_output(output, results)
    assert not run.scheduler.is_recorded
    replay = replay_scheduler(run.path)
    assert replay.difference is None
    assert replay.counts["TakenIn"] == 1


def test_a_request_that_rests_on_more_than_calls_ends_the_recording(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    run.scheduler.add_request(make_request("plain"))
    run.step()
    run.scheduler.add_request(make_request("g", structured_output=StructuredOutputParams("regex", "a")))
    assert not run.scheduler.is_recorded
    run.scheduler.finish_requests("g", RequestStatus.FINISHED_ABORTED)
    run.run()
    replay = replay_scheduler(run.path)
    assert replay.difference is None
    assert replay.ends_early == "request g has a grammar, which is compiled beside the scheduler"


def test_a_recording_that_is_full_can_be_replayed_up_to_its_end(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path, max_bytes=12_000)
    for number in range(9):
        run.scheduler.add_request(make_request(f"r{number}", 10, max_tokens=6))
    run.run()
    assert not run.scheduler.is_recorded
    replay = replay_scheduler(run.path)
    assert replay.difference is None
    assert replay.num_decisions > 3


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"version": 99}, "it has version 99, and this raypd reads version 1"),
        ({"scheduler": {"max_num_seqs": -1}}, "its settings are not those of an engine"),
        ({"abilities": ("flying",)}, "its settings are not those of an engine"),
    ],
)
def test_settings_that_no_engine_has_are_refused(tmp_path: Path, header: dict[str, object], message: str) -> None:
    run = RecordedRun(tmp_path, header=header)
    run.file.close()
    with pytest.raises(InvalidRecording, match=message):
        replay_scheduler(run.path)


def test_a_file_of_something_else_is_refused_with_the_record(tmp_path: Path) -> None:
    run = _busy_run(tmp_path)
    data = run.path.read_bytes()
    for number, (broken, message) in enumerate(
        [
            (b"", "record 1 is no record of an engine"),
            (b"\x01\x00\x00\x00\xff" + data, "record 1 is no record of an engine"),
            (data + data, "record .* is not possible here: KeyError"),
            (data + b"\x01\x00\x00\x00\xff", "record .* is no record of an engine"),
        ]
    ):
        path = tmp_path / f"broken {number}"
        path.write_bytes(broken)
        with pytest.raises(InvalidRecording, match=message):
            replay_scheduler(path)
