"""Service-level aims (SLO): this is the one place where they are declared.

A field of SloConfig has an aim's name, in milliseconds, and its range. What follows from it:

    settings  `slo` of the cluster, and `slo` and `tightest_slo` of a token
    gRPC      the fields of raypd.v1.Slo are read by these names (api/grpc/conversions/generate.py)
    HTTP      the field `slo` of bodies is an object with these names (api/http/requests.py)
    client    the option `slo` is a mapping with these names
    checks    check_slo() (parameters/slo_rules.py) holds the range against what a request gives
    engines   get aims in seconds (actors/core/requests/slo.py)
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

from pydantic import BaseModel, ConfigDict, Field

from actors.core.requests.slo import MAX_AIM_S, Slo

MAX_AIM_MS: Final = 1e3 * MAX_AIM_S


class SloConfig(BaseModel):
    """Service-level aims. They decide where requests run; a request that misses them is served all the same."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ttft_ms: float | None = Field(
        None,
        gt=0,
        le=MAX_AIM_MS,
        description="Milliseconds from a request's arrival to its first token (TTFT); default: no aim.",
    )
    itl_ms: float | None = Field(
        None,
        gt=0,
        le=MAX_AIM_MS,
        description="Milliseconds from a token of a request to its next one (inter-token latency), the mean over the "
        "request; default: no aim.",
    )

    @property
    def aims(self) -> Aims:
        """The cluster's aims, in the form in which a request has its own."""
        return Aims(ttft_ms=self.ttft_ms, itl_ms=self.itl_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class Aims:
    """Aims as a client gave them, in milliseconds and of any value; None is "not given"."""

    ttft_ms: float | None = None
    itl_ms: float | None = None

    @classmethod
    def first_of(cls, *layers: Aims) -> Aims:
        """Return each aim from the first of the layers that has it."""
        return cls(
            ttft_ms=next((one.ttft_ms for one in layers if one.ttft_ms is not None), None),
            itl_ms=next((one.itl_ms for one in layers if one.itl_ms is not None), None),
        )

    @property
    def slo(self) -> Slo | None:
        """The aims in seconds, as engines and routers get them; None if there is none. They are in range."""
        if self == NO_AIMS:
            return None
        return Slo(ttft_s=_seconds(self.ttft_ms), itl_s=_seconds(self.itl_ms))


AIMS: Final = tuple(one.name for one in fields(Aims))
NO_AIMS: Final = Aims()


def _seconds(aim_ms: float | None) -> float | None:
    return None if aim_ms is None else aim_ms / 1e3
