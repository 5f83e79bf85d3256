"""Saves an engine's cost model every so often, and at the engine's end, on a thread of its own.

Engines of each role have a file of their own: one that decodes would replace what one that prefills knows of prompts.

A disk that is full, slow or not writable costs the engine nothing but the file: the first failure is logged, and the
thread goes on trying.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from actors.costs.cost_file import CostFileRefused, CostIdentity, load_cost_model, remove_unfinished, save_cost_model
from actors.costs.step_cost_model import StepCostModel

logger = logging.getLogger(__name__)

CACHE_VARIABLE: Final = "RAYPD_CACHE_ROOT"
"""The environment variable that names the directory of all files that raypd may lose."""
_INTERVAL_S: Final = 30.0
_STOP_TIMEOUT_S: Final = 2.0


def default_directory() -> Path:
    """Return where cost models are kept if no setting says where."""
    root = os.environ.get(CACHE_VARIABLE)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return (Path(root) if root else Path(cache) / "raypd") / "step_costs"


class CostKeeper:
    """The file of one engine's cost model. load() comes before start(); the thread runs from start() to stop()."""

    def __init__(self, directory: Path | None, identity: CostIdentity, engine_id: str, role: str) -> None:
        """directory: the file's directory, which is made when the file is saved; None: no file is read or written

        role: that the engine begins with
        """
        self._path = None if directory is None else directory / identity.file_name(role)
        self._identity = identity
        self._engine_id = engine_id
        self._read: Callable[[], StepCostModel | None] = lambda: None
        self._has_failed = False
        self._saved_at_s = 0.0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="step-costs", daemon=True)

    def load(self) -> StepCostModel | None:
        """Return the saved model of this role, or else one of another role that knows prompts and decoding.

        Returns None if there is none, or if it was refused, which is logged.
        """
        if self._path is None:
            return None
        if (own := self._load(self._path)) is not None:
            self._saved_at_s = own.updated_at_s
            return own
        for path in sorted(self._path.parent.glob(self._identity.file_name("*"))):
            found = None if path == self._path else self._load(path)
            if found is not None and found.knows("prefill") and found.knows("decode"):
                return found
        return None

    def _load(self, path: Path) -> StepCostModel | None:
        try:
            remove_unfinished(path)
            return load_cost_model(path, self._identity, self._engine_id) if path.exists() else None
        except (CostFileRefused, OSError) as error:
            logger.warning("a saved model of step costs is ignored: %s", error)
            return None

    def start(self, read: Callable[[], StepCostModel | None]) -> None:
        """Begin to save. read: returns the newest model; called on the keeper's thread"""
        if self._path is not None:
            self._read = read
            self._thread.start()

    def stop(self) -> None:
        """Save once more, and wait for that for two seconds at most."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_TIMEOUT_S)

    def _run(self) -> None:
        while not self._stopping.wait(_INTERVAL_S):
            self._save()
        self._save()

    def _save(self) -> None:
        cost_model = self._read()
        # A model that has seen no new step would only hide how old it is, and a vague one is worse than none.
        if self._path is None or cost_model is None or not cost_model.is_sure:
            return
        if cost_model.updated_at_s == self._saved_at_s:
            return
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            save_cost_model(self._path, self._identity, cost_model, time.time(), self._engine_id)
        except OSError as error:
            if not self._has_failed:
                logger.warning("the model of step costs is not saved: %s: %s", self._path, error.strerror or error)
            self._has_failed = True
        else:
            self._has_failed, self._saved_at_s = False, cost_model.updated_at_s
