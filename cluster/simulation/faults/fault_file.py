"""Reads what goes wrong in a simulation, and when, from a YAML file.

    faults:
      - kill: {engine: decode-0, at_s: 60}
      - stop: {engine: prefill-0, at_s: 60, until_s: 65}
      - slow: {engine: decode-1, at_s: 30, until_s: 90, factor: 3}
      - partition: {engines: [prefill-0, decode-0], at_s: 10, until_s: 20}
    stats: {delay_s: 2, interval_s: 0.5}   # how old the reports of engines are, and how often engines report
    restart_s: 30                          # a killed engine serves again after so many seconds; without it: never

Times are seconds from the beginning of the workload.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cluster.errors import InvalidConfig
from cluster.simulation.cluster_spec import ClusterSpec
from cluster.simulation.faults.fault import Fault, KillEngine, Partition, SlowEngine, StopEngine

_MAX_BYTES: Final = 16 << 20
_Seconds = Annotated[float, Field(ge=0, le=1e10, allow_inf_nan=False)]
_Name = Annotated[str, Field(min_length=1, max_length=1024)]


class _Values(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class _Kill(_Values):
    engine: _Name
    at_s: _Seconds


class _Stop(_Values):
    engine: _Name
    at_s: _Seconds
    until_s: _Seconds

    @model_validator(mode="after")
    def _ends_after_it_begins(self) -> Self:
        _check_span(self.at_s, self.until_s)
        return self


class _Slow(_Stop):
    factor: float = Field(gt=0, le=1e6, allow_inf_nan=False)


class _Partition(_Values):
    engines: Annotated[tuple[_Name, ...], Field(min_length=1)]
    at_s: _Seconds
    until_s: _Seconds

    @model_validator(mode="after")
    def _ends_after_it_begins(self) -> Self:
        _check_span(self.at_s, self.until_s)
        return self


class _Entry(_Values):
    kill: _Kill | None = None
    stop: _Stop | None = None
    slow: _Slow | None = None
    partition: _Partition | None = None

    @model_validator(mode="after")
    def _is_one_fault(self) -> Self:
        if sum(one is not None for one in (self.kill, self.stop, self.slow, self.partition)) != 1:
            raise ValueError("name one of kill, stop, slow and partition; further faults are entries of their own")
        return self

    def fault(self) -> Fault:
        if self.kill is not None:
            return KillEngine(self.kill.at_s, self.kill.engine)
        if self.slow is not None:
            return SlowEngine(self.slow.at_s, self.slow.until_s, self.slow.engine, self.slow.factor)
        if self.stop is not None:
            return StopEngine(self.stop.at_s, self.stop.until_s, self.stop.engine)
        assert self.partition is not None, "one of the four is there"
        return Partition(self.partition.at_s, self.partition.until_s, frozenset(self.partition.engines))

    @property
    def engine_ids(self) -> tuple[str, ...]:
        alone = [one.engine for one in (self.kill, self.stop, self.slow) if one is not None]
        return tuple(alone) if self.partition is None else self.partition.engines


class _Stats(_Values):
    delay_s: _Seconds | None = None
    interval_s: float | None = Field(None, gt=0, le=3600, allow_inf_nan=False)


class FaultPlan(_Values):
    """The faults of a simulation, and the age of its statistics.

    faults:    each kind as in the description of this module
    stats:     the age and the interval of engines' reports; what is left out stays as it is
    restart_s: a killed engine serves again after so many seconds; None: as the cluster has it
    """

    faults: tuple[_Entry, ...] = ()
    stats: _Stats = _Stats()
    restart_s: _Seconds | None = None

    def faults_of(self, spec: ClusterSpec, source: str) -> list[Fault]:
        """Return the faults. Raises InvalidConfig for engines that the cluster does not have. source: for the error"""
        known = {engine.engine_id for engine in spec.engines}
        mistakes = [
            f"faults.{index}: there is no engine {name!r}; this cluster has {_listed(sorted(known))}"
            for index, entry in enumerate(self.faults)
            for name in entry.engine_ids
            if name not in known
        ]
        if mistakes:
            raise InvalidConfig(source, mistakes)
        return sorted((entry.fault() for entry in self.faults), key=lambda fault: fault.at_s)

    def changes(self) -> dict[str, float]:
        """Return the fields of ClusterSpec that the plan sets."""
        given = {
            "stats_delay_s": self.stats.delay_s,
            "stats_interval_s": self.stats.interval_s,
            "restart_s": self.restart_s,
        }
        return {name: value for name, value in given.items() if value is not None}


def read_fault_file(path: Path) -> FaultPlan:
    """Read a file. Raises InvalidConfig with every mistake."""
    source = f"--faults {path}"
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise InvalidConfig(source, [f"it is longer than {_MAX_BYTES} bytes"])
        values = yaml.safe_load(data.decode())
    except OSError as error:
        raise InvalidConfig(source, [f"it cannot be read: {error.strerror}"]) from error
    except (UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise InvalidConfig(source, [f"it is not YAML: {error}"]) from error
    if values is not None and not isinstance(values, dict):
        keys = ", ".join(FaultPlan.model_fields)
        kind = type(values).__name__
        raise InvalidConfig(source, [f"the file: Input should be a mapping with any of {keys}, and is a {kind}"])
    try:
        return FaultPlan.model_validate(values or {})
    except ValidationError as error:
        mistakes = [f"{'.'.join(map(str, one['loc'])) or 'the file'}: {one['msg']}" for one in error.errors()]
        raise InvalidConfig(source, mistakes) from error


def _check_span(at_s: float, until_s: float) -> None:
    if until_s <= at_s:
        raise ValueError(f"until_s is {until_s:g} and at_s {at_s:g}: it has to end after it begins")


def _listed(names: list[str]) -> str:
    shown = names[:8]
    return ", ".join(shown) + (f" and {len(names) - len(shown)} more" if len(names) > len(shown) else "")
