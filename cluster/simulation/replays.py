"""Replays recordings of decisions: the production schedulers and routers get the recorded calls again."""

from __future__ import annotations

from pathlib import Path

from actors.errors import InvalidRecording
from actors.recording.engine_events import CODEC, EngineHeader
from actors.recording.recording_file import read_records
from actors.recording.replay import Replay
from actors.recording.scheduler_replay import replay_scheduler
from cluster.routing.recording.router_replay import replay_routers
from kv_transfer.message_ranges import MALFORMED


def replay_recording(path: Path) -> Replay:
    """Replay a recording of an engine or of an ingress, up to its end or to the first difference.

    Raises InvalidRecording.
    """
    first = next(read_records(path), None)
    if first is None:
        raise InvalidRecording(path, "it has no record")
    try:
        is_engine = isinstance(CODEC.decode(first), EngineHeader)
    except MALFORMED:
        is_engine = False
    return replay_scheduler(path) if is_engine else replay_routers(path)
