"""Begins to record an engine's decisions, if the settings ask for it and all that decides them can be recorded."""

from __future__ import annotations

import logging
from collections.abc import Collection

from actors.config import EngineConfig
from actors.core.requests.abilities import Ability
from actors.recording.engine_events import EngineHeader
from actors.recording.read_clock import ReadClock
from actors.recording.recorded_scheduler import RecordedScheduler
from actors.recording.recording_file import RecordingFile
from actors.recording_config import DecisionRecordingConfig

logger = logging.getLogger(__name__)


def may_record(config: EngineConfig, abilities: Collection[Ability]) -> DecisionRecordingConfig | None:
    """Return the settings of the recording; None if nothing is recorded.

    The log says why, if the settings ask for a recording that cannot be made.

    abilities: the abilities of the engine's worker
    """
    recording = config.decision_recording
    if recording is None:
        return None
    if (reason := _why_not(config, abilities)) is not None:
        logger.warning("the engine's decisions are not recorded", extra={"reason": reason})
        return None
    return recording


def _why_not(config: EngineConfig, abilities: Collection[Ability]) -> str | None:
    if config.kv_transfer.cpu_cache_gib or config.kv_transfer.stores:
        return "the contents of KV stores outside of the device are not recorded"
    if Ability.MULTIMODAL in abilities or config.role == "encode":
        return "transfers of images are not recorded"
    return None


def begin_recording(
    scheduler: RecordedScheduler, settings: DecisionRecordingConfig, header: EngineHeader, clock: ReadClock
) -> None:
    """Let a scheduler that was not called yet record what it decides. A file that cannot be made is logged.

    clock: the clock that the scheduler reads
    """
    name = f"engine-{header.engine_id}-{header.incarnation}"
    try:
        file = RecordingFile(settings.directory, name, settings.max_file_mib << 20)
    except OSError as error:
        logger.warning("the engine's decisions are not recorded", extra={"reason": str(error)})
        return
    scheduler.record(file, header, clock)
    logger.info("the engine's decisions are recorded", extra={"path": str(file.path)})
