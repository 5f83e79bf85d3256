"""The settings of routing: how the engines of a request are chosen."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from cluster.routing.decision import RoutingMode as RoutingMode


class RoutingConfig(BaseModel):
    """The choice of the engines that serve a request."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mode: RoutingMode = Field(
        RoutingMode.COST,
        description="Way of requests through the engines. cost: for each request the way that costs the least engine "
        "time by measured costs: prefill on one engine and decode on another, or both on one. disaggregate: prefill "
        "and decode on two engines wherever a pair exists. aggregate: prefill and decode on one engine, whatever its "
        "role.",
    )
    prefix_index_mib: int = Field(
        256,
        ge=1,
        description="Limit on the memory of an ingress's index of the prefixes that engines have cached, in MiB, for "
        "each version of the model. An index that is too small for all blocks of all engines keeps every second block "
        "of a prefix, or every fourth, and so on.",
    )
