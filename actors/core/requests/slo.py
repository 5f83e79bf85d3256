"""A request's service-level aims: how soon its first token should come, and how soon each further one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

from msgspec import Meta

MAX_AIM_S: Final = 3600.0

_Aim = Annotated[float, Meta(gt=0.0, le=MAX_AIM_S)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """The aims of one request, in seconds; None is no aim. Aims decide where a request runs, never when its turn is.

    ttft_s: from the request's arrival at the ingress to its first token (TTFT)
    itl_s:  from each token to the next one (inter-token latency)
    """

    ttft_s: _Aim | None = None
    itl_s: _Aim | None = None
