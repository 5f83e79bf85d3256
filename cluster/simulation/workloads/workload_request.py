"""A request that a simulated client sends."""

from __future__ import annotations

from typing import Final

import msgspec

from cluster.traces.trace_request import BLOCK_TOKENS

HASHED_TOKENS: Final = BLOCK_TOKENS
"""Tokens of a prompt for which there is one of WorkloadRequest.block_hashes."""


class WorkloadRequest(msgspec.Struct, frozen=True, gc=False):
    """A request: when it comes, and how long it is. Its tokens themselves matter to nobody in a simulation.

    arrival_s:         from the beginning of the workload; requests of a workload come in the order of arrival
    num_prompt_tokens: at least 1
    num_output_tokens: at least 1; the length at which the request ends
    block_hashes:      one for each HASHED_TOKENS tokens of the prompt, the last one possibly for fewer. Requests with
                       an equal hash have an equal prompt up to the end of its block. Empty: nobody shares the prompt
    tenant:            the tenant that the request belongs to
    ttft_s, itl_s:     the request's own aims; None: those of the cluster hold
    """

    request_id: str
    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    block_hashes: tuple[int, ...] = ()
    tenant: str = ""
    ttft_s: float | None = None
    itl_s: float | None = None
