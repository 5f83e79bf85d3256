"""Keeps a step cost model in a JSON file, so that the next start of the same engine does not begin without one."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

import msgspec

from actors.costs.step_cost_model import CostOrigin, StepCostModel
from actors.costs.step_shape import FEATURES

SCHEMA: Final = "raypd-step-cost/2"
"""The name and the version of the file's form. Another meaning of any field is another version."""
_MAX_BYTES: Final = 1 << 16
_UNFINISHED_S: Final = 3600.0
"""An unfinished file that is older than this was left by a process that was killed."""
_Name = Annotated[str, msgspec.Meta(max_length=512)]


class CostFileRefused(Exception):
    """A file of a step cost model cannot be used; the text names the file and the reason."""


class CostIdentity(msgspec.Struct, frozen=True):
    """The model, the device and the settings that a step's duration depends on.

    model:     the name or path of the model, as configured
    device:    the name of the device, such as a GPU's name, or the processor and the number of threads
    dtype:     the data type of weights and KV cache
    num_ranks: tensor-parallel ranks
    """

    model: _Name
    device: _Name
    dtype: _Name
    num_ranks: Annotated[int, msgspec.Meta(ge=1)] = 1

    def file_name(self, role: str) -> str:
        """Return the name of the file of engines with this identity that begin with a role."""
        return f"step-cost-{hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:16]}-{role}.json"


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    schema: _Name
    features: tuple[_Name, ...]
    identity: CostIdentity
    saved_at_s: Annotated[float, msgspec.Meta(ge=0.0)]
    saved_by: _Name
    cost_model: StepCostModel


def save_cost_model(
    path: Path, identity: CostIdentity, cost_model: StepCostModel, saved_at_s: float, saved_by: str
) -> None:
    """Write the file as a whole: a reader sees the old or the new one. Raises OSError, with the old one in place.

    saved_at_s: Unix time; saved_by: the engine's id
    Only the user of the process may read the file. A process that is killed leaves an unfinished file behind, which
    the next engine removes.
    """
    written = _File(SCHEMA, FEATURES, identity, saved_at_s, saved_by, cost_model)
    number, unfinished = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(number, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(written)) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        Path(unfinished).replace(path)
    except BaseException:
        Path(unfinished).unlink()
        raise


def remove_unfinished(path: Path, now_s: float | None = None) -> None:
    """Remove what processes that were killed have left of this file. now_s: Unix time. Raises OSError."""
    oldest_s = (time.time() if now_s is None else now_s) - _UNFINISHED_S
    for unfinished in path.parent.glob(f".{path.name}.*"):
        with contextlib.suppress(FileNotFoundError):
            if unfinished.lstat().st_mtime < oldest_s:
                unfinished.unlink()


def load_cost_model(path: Path, identity: CostIdentity, engine_id: str = "") -> StepCostModel:
    """Read the file of an engine with this identity. Raises CostFileRefused.

    engine_id: of the engine that reads it; the model's origin tells whether this engine has saved the file
    """
    try:
        data = _read(path)
    except OSError as error:
        raise CostFileRefused(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > _MAX_BYTES:
        raise CostFileRefused(f"{path} is longer than {_MAX_BYTES} bytes, so it is no step cost model")
    try:
        schema = msgspec.json.decode(data, type=dict[str, msgspec.Raw]).get("schema", msgspec.Raw(b"null"))
        if bytes(schema) != msgspec.json.encode(SCHEMA):
            raise CostFileRefused(f"{path} has the schema {bytes(schema).decode()}, and this raypd reads {SCHEMA!r}")
        file_ = msgspec.json.decode(data, type=_File)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CostFileRefused(f"{path} is no step cost model: {error}") from error
    if file_.features != FEATURES:
        raise CostFileRefused(f"{path} has the features {', '.join(file_.features)}; this raypd has others")
    for name in CostIdentity.__struct_fields__:
        found, wanted = getattr(file_.identity, name), getattr(identity, name)
        if found != wanted:
            raise CostFileRefused(f"{path} was fitted with {name} {found!r}, and this engine has {wanted!r}")
    origin = CostOrigin.FILE if file_.saved_by == engine_id else CostOrigin.SIBLING
    return replace(file_.cost_model, origin=origin)


def _read(path: Path) -> bytes:
    """Read a regular file up to the limit, and never wait for a pipe. Raises OSError or CostFileRefused."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise CostFileRefused(f"{path} is not a regular file")
        return file.read(_MAX_BYTES + 1)
