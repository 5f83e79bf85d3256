from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from actors.recording_config import DecisionRecordingConfig


def test_a_directory_is_an_absolute_path() -> None:
    assert DecisionRecordingConfig(directory=Path("/var/log")).max_file_mib == 256
    with pytest.raises(ValidationError, match="here is no absolute path"):
        DecisionRecordingConfig(directory=Path("here"))
