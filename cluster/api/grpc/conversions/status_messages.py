"""raypd.v1's messages about a cluster's status, made from what is known of it."""

from __future__ import annotations

from actors.core.requests.adapter import AdapterStats
from actors.core.stats import EmbeddingStats, SchedulerStats, SpecDecodingStats
from cluster.api.protos.raypd.v1 import admin_pb2
from cluster.api.shared.version import server_version
from cluster.observability.status import ClusterView, EngineView, IngressView, ModelView, RequestView
from kv_transfer.connector.store_steps import StoreStats
from kv_transfer.transfer_stats import LinkStats, TransferStats


def status_to_proto(view: ClusterView) -> admin_pb2.GetStatusResponse:
    """The whole answer."""
    return admin_pb2.GetStatusResponse(
        model=view.model,
        server_version=server_version(),
        membership_version=view.membership_version,
        engines=[_engine(engine, view.now_s) for engine in view.engines],
        requests=[_request(request, view.now_s) for request in view.requests],
        decisions=[
            admin_pb2.Decision(age_seconds=_age(decision.at_s, view.now_s), text=decision.text)
            for decision in view.controller.decisions
        ],
        controller_error=view.controller.error,
        update=view.controller.update,
        moves=view.num_moves,
        models=[_model(model) for model in view.models],
        ingresses=[_ingress(ingress) for ingress in view.controller.ingresses],
        refused_pairs=[
            admin_pb2.RefusedPair(prefill_engine=pair.prefill, decode_engine=pair.decode, reason=pair.reason)
            for pair in view.refused_pairs
        ],
    )


def _model(model: ModelView) -> admin_pb2.ModelVersionStatus:
    return admin_pb2.ModelVersionStatus(
        version=model.version,
        directory=model.directory,
        engines=model.num_engines,
        requests=model.num_requests,
        last_error=model.last_error,
    )


def _ingress(ingress: IngressView) -> admin_pb2.IngressStatus:
    return admin_pb2.IngressStatus(
        number=ingress.number,
        incarnation=ingress.incarnation,
        state=ingress.state,
        address=ingress.address,
        node=ingress.node,
        last_error=ingress.last_error,
        requests=ingress.num_requests,
        http_address=ingress.http_address,
        busy_seconds=ingress.busy_s,
    )


def _engine(engine: EngineView, now_s: float) -> admin_pb2.EngineStatus:
    message = admin_pb2.EngineStatus(
        engine_id=engine.engine_id,
        incarnation=engine.incarnation,
        role=engine.role,
        state=engine.state,
        address=engine.address,
        last_error=engine.last_error,
        kv_transport=engine.kv_transport,
        node=engine.node,
        model_version=engine.model_version,
    )
    stats = engine.stats
    if stats is None:
        return message
    message.age_seconds = _age(engine.stats_at_s, now_s)
    message.load.CopyFrom(_load(stats))
    if stats.transfer_stats is not None:
        message.transfers.CopyFrom(_transfers(stats.transfer_stats, now_s))
        message.links.extend(_link(link, now_s) for link in stats.transfer_stats.links)
    if stats.store_stats is not None:
        message.stores.CopyFrom(_stores(stats.store_stats))
    if stats.spec_decoding_stats is not None:
        message.guesses.CopyFrom(_guesses(stats.spec_decoding_stats))
    if stats.adapter_stats is not None:
        message.adapters.CopyFrom(_adapters(stats.adapter_stats))
    embeddings = stats.embedding_stats
    if embeddings is not None and embeddings != EmbeddingStats():
        message.embeddings.CopyFrom(_embeddings(embeddings))
    return message


def _embeddings(stats: EmbeddingStats) -> admin_pb2.EmbeddingStatus:
    return admin_pb2.EmbeddingStatus(
        received=stats.num_received, failed=stats.num_failed, sent=stats.num_sent, not_sent=stats.num_not_sent
    )


def _adapters(stats: AdapterStats) -> admin_pb2.AdapterStatus:
    return admin_pb2.AdapterStatus(
        loaded=stats.loaded,
        waiting=stats.num_waiting_reqs,
        loads=stats.num_loads,
        failed_loads=stats.num_failed_loads,
        evictions=stats.num_evictions,
    )


def _load(stats: SchedulerStats) -> admin_pb2.EngineLoad:
    prefix = stats.prefix_cache_stats
    return admin_pb2.EngineLoad(
        running=stats.num_running_reqs,
        waiting=stats.num_waiting_reqs,
        waiting_for_remote_kvs=stats.num_waiting_for_remote_kvs,
        held=stats.num_held_reqs,
        blocks=stats.num_blocks,
        free_blocks=stats.num_free_blocks,
        preemptions=stats.num_preemptions,
        prompt_tokens=stats.num_prompt_tokens_computed,
        output_tokens=stats.num_output_tokens,
        steps=stats.num_steps,
        prefix_queried_tokens=prefix.queries,
        prefix_cached_tokens=prefix.hits,
        prefix_loaded_tokens=prefix.loaded,
        late_completions=stats.num_late_completions,
    )


def _transfers(stats: TransferStats, now_s: float) -> admin_pb2.TransferStatus:
    num_timed = max(1, stats.num_timed_transfers)
    return admin_pb2.TransferStatus(
        sent_bytes=stats.num_sent_bytes,
        received_bytes=stats.num_received_bytes,
        sent_chunks=stats.num_sent_chunks,
        received_chunks=stats.num_received_chunks,
        completed=stats.num_transfers_completed,
        failed=stats.num_transfers_failed,
        cancelled=stats.num_transfers_cancelled,
        retries=stats.num_retries,
        stalls=stats.num_stalls,
        corrupt_chunks=stats.num_corrupt_chunks,
        links_lost=stats.num_links_lost,
        mean_transfer_seconds=stats.transfer_s / num_timed,
        mean_exposed_seconds=stats.exposed_s / num_timed,
        active=stats.num_active_transfers,
        pinned_blocks=stats.num_pinned_blocks,
        oldest_pin_seconds=0.0 if stats.oldest_pin_at_s is None else _age(stats.oldest_pin_at_s, now_s),
        dropped_messages=stats.dropped_messages,
    )


def _link(link: LinkStats, now_s: float) -> admin_pb2.LinkStatus:
    return admin_pb2.LinkStatus(
        peer_engine_id=link.peer_engine_id,
        peer_incarnation=link.peer_incarnation,
        end=link.role.value,
        state=link.state.name.lower(),
        active_transfers=link.num_active_transfers,
        bytes=link.num_bytes,
        age_seconds=_age(link.opened_at_s, now_s),
        idle_seconds=_age(link.last_active_at_s, now_s),
        last_error=link.last_error,
    )


def _stores(stats: StoreStats) -> admin_pb2.StoreStatus:
    return admin_pb2.StoreStatus(
        saved_blocks=stats.num_saved_blocks,
        unsaved_blocks=stats.num_unsaved_blocks,
        loaded_blocks=stats.num_loaded_blocks,
        missing_blocks=stats.num_missing_blocks,
    )


def _guesses(stats: SpecDecodingStats) -> admin_pb2.GuessStatus:
    return admin_pb2.GuessStatus(
        drafts=stats.num_drafts,
        guessed_tokens=stats.num_draft_tokens,
        accepted_tokens=stats.num_accepted_tokens,
        accepted_by_place=stats.num_accepted_tokens_per_pos,
    )


def _request(request: RequestView, now_s: float) -> admin_pb2.RequestInFlight:
    return admin_pb2.RequestInFlight(
        request_id=request.request_id,
        age_seconds=_age(request.arrived_at_s, now_s),
        phase=request.phase,
        prefill_engine=request.prefill_engine,
        decode_engine=request.decode_engine,
        prompt_tokens=request.num_prompt_tokens,
        output_tokens=request.num_output_tokens,
        model_version=request.model_version,
        attempt=request.attempt,
        moves=request.num_moves,
        tenant=request.tenant,
    )


def _age(at_s: float, now_s: float) -> float:
    """Clocks of two hosts may differ a little; nothing is from the future."""
    return max(0.0, now_s - at_s)
