"""The outputs for clients: collected while a step is put together and taken in, handed out once per step."""

from __future__ import annotations

import numpy as np

from actors.core.outputs.ending import Ending
from actors.core.outputs.engine_core_outputs import (
    DecodedTokens,
    EndCause,
    EngineCoreOutput,
    EngineCoreOutputs,
    Preemption,
    RequestTimings,
)
from actors.core.outputs.model_runner_output import TokenLogprobs
from actors.core.requests.multimodal import EMBEDDINGS
from actors.core.requests.request import Request, RequestStatus
from actors.core.requests.request_status import FINISH_REASONS


class ClientOutputs:
    """Collects the outputs for each client until take() hands them out."""

    def __init__(self) -> None:
        self._outputs: dict[int, EngineCoreOutputs] = {}

    def add_tokens(
        self,
        request: Request,
        token_ids: list[int],
        logprobs: list[TokenLogprobs] | None,
        prompt_logprobs: list[TokenLogprobs] | None,
    ) -> None:
        """Add the new tokens of a request that goes on."""
        output = EngineCoreOutput(
            request_id=request.request_id,
            attempt=request.attempt,
            new_token_ids=token_ids,
            first_position=request.num_output_tokens - len(token_ids),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )
        self._of(request.client_index).others.append(output)

    def add_decoded(
        self,
        client_index: np.ndarray,
        req_ids: np.ndarray,
        attempts: np.ndarray,
        positions: np.ndarray,
        token_ids: np.ndarray,
    ) -> None:
        """Add the new tokens of requests that got one token each and go on. All arrays are [num_requests]."""
        clients = sorted(set(client_index.tolist()))
        if len(clients) == 1:
            tokens = DecodedTokens(req_ids.tolist(), attempts.tolist(), positions.tolist(), token_ids.tolist())
            self._of(clients[0]).decoded = tokens
            return
        for client in clients:
            own = client_index == client
            self._of(client).decoded = DecodedTokens(
                req_ids[own].tolist(), attempts[own].tolist(), positions[own].tolist(), token_ids[own].tolist()
            )

    def add_end(self, ending: Ending, now_s: float) -> None:
        """Add the end of a request, with its last tokens if there are any; its status gives the finish reason."""
        request = ending.request
        is_stopped = request.status is RequestStatus.FINISHED_STOPPED and request.num_output_tokens > 0
        last_token_id = request.all_token_ids[-1] if request.num_output_tokens else None
        is_stop_token = is_stopped and last_token_id in request.stop_token_ids
        is_handed_over = ending.cause is EndCause.HANDED_OVER
        output = EngineCoreOutput(
            request_id=request.request_id,
            attempt=request.attempt,
            new_token_ids=list(ending.new_token_ids),
            first_position=request.num_output_tokens - len(ending.new_token_ids),
            finish_reason=None if is_handed_over else FINISH_REASONS[request.status],
            stop_token_id=last_token_id if is_stop_token else None,
            stop_reason="repetition" if is_stopped and not is_stop_token else None,
            error=ending.error,
            end_cause=ending.cause,
            logprobs=ending.logprobs,
            prompt_logprobs=ending.prompt_logprobs,
            pooling_output=ending.pooling_output,
            timings=_timings(request, now_s),
        )
        self._of(request.client_index).others.append(output)

    def add_preemption(self, request: Request, preemption: Preemption) -> None:
        """Add the preemption of a request, which has lost its blocks."""
        output = EngineCoreOutput(
            request_id=request.request_id,
            attempt=request.attempt,
            new_token_ids=[],
            first_position=request.num_output_tokens,
            preemption=preemption,
        )
        self._of(request.client_index).others.append(output)

    def add_finished_id(self, request: Request) -> None:
        """Name a request that has ended, whether or not its client gets an output for it."""
        self._of(request.client_index).finished_req_ids.add(request.request_id)

    def take(self) -> dict[int, EngineCoreOutputs]:
        """Return and forget all outputs, by client index."""
        outputs, self._outputs = self._outputs, {}
        return outputs

    def _of(self, client_index: int) -> EngineCoreOutputs:
        outputs = self._outputs.get(client_index)
        if outputs is None:
            outputs = self._outputs[client_index] = EngineCoreOutputs()
        return outputs


def _timings(request: Request, now_s: float) -> RequestTimings:
    queued_at_s = request.status_changes[0].at_s
    scheduled_at_s = now_s if request.scheduled_at_s is None else request.scheduled_at_s
    first_token_at_s = scheduled_at_s if request.first_token_at_s is None else request.first_token_at_s
    return RequestTimings(
        queued_s=scheduled_at_s - queued_at_s,
        prefill_s=first_token_at_s - scheduled_at_s,
        num_prompt_tokens_computed=request.num_prompt_tokens_computed,
        num_cached_tokens=request.num_cached_tokens,
        num_preemptions=request.num_preemptions,
        status_changes=list(request.status_changes),
        transfer=request.transfer_timings,
        num_fetched_images=sum(EMBEDDINGS in image.arrays for image in request.encoder_inputs),
    )
