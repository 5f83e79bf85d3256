"""Makes the submissions of one attempt: what each engine of a route gets. Pure."""

from __future__ import annotations

from dataclasses import replace

from actors.core.requests.request import EngineCoreRequest
from cluster.routing.base import EngineT, Route
from kv_transfer.params import HandoffRanks, KVTransferParams, TransferRole


def submission_alone(request: EngineCoreRequest, route: Route[EngineT]) -> EngineCoreRequest:
    """Return what an engine gets that computes the prompt and decodes."""
    return replace(request, prefix_source=route.prefix_source)


def submission_with_ticket(request: EngineCoreRequest, route: Route[EngineT], role: TransferRole) -> EngineCoreRequest:
    """Return what one engine of a handoff gets. role: the engine's own"""
    assert route.prefill is not None, "an engine that prefills and decodes needs no ticket"
    prefill, decode = route.prefill.descriptor, route.decode.descriptor
    peer = prefill if role is TransferRole.CONSUMER else decode
    transfer_id = f"{request.request_id}/{request.attempt}"
    ranks = HandoffRanks(prefill.handoff_rank, decode.handoff_rank)
    ticket = KVTransferParams(transfer_id, request.attempt, role, peer.kv_address, ranks=ranks)
    # The consumer gets the blocks that it lacks from its producer.
    source = route.prefix_source if role is TransferRole.PRODUCER else None
    # The inputs of images are large, and the consumer gets the KV that the producer computes from them.
    inputs = request.encoder_inputs if role is TransferRole.PRODUCER else ()
    return replace(request, kv_transfer_params=ticket, prefix_source=source, encoder_inputs=inputs)
