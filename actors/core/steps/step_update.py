"""Takes in what a step computed: appends tokens, names full blocks, tells clients, returns complete requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from actors.core.blocks.kv_cache_manager import KVCacheManager
from actors.core.drafts.draft_control import DraftControl
from actors.core.encoder.encoder_cache_manager import EncoderCacheManager
from actors.core.outputs.ending import Ending
from actors.core.outputs.engine_core_outputs import EndCause
from actors.core.outputs.model_runner_output import NO_TOKEN, ModelRunnerOutput, TokenLogprobs
from actors.core.outputs.scheduler_output import StepBatch
from actors.core.outputs.scheduler_stats import SchedulerStats, SpecDecodingStats
from actors.core.requests.request import Request
from actors.core.requests.request_status import RequestStatus
from actors.core.requests.running_rows import RunningRows
from actors.core.requests.stop import find_stop
from actors.core.requests.structured_output import StructuredOutputManager, find_objection
from actors.core.steps.client_outputs import ClientOutputs
from actors.errors import IntegrityError
from kv_transfer.connector.steps import ProducerEnd
from kv_transfer.params import TransferRole


class StepUpdate:
    """Takes in the results of steps. A request that ended, or was preempted, since a step was scheduled gets none.

    Methods never end a request: they return Endings, which the scheduler carries out.
    """

    def __init__(
        self,
        rows: RunningRows,
        kv_cache_manager: KVCacheManager,
        encoder_cache_manager: EncoderCacheManager,
        client_outputs: ClientOutputs,
        stats: SchedulerStats,
        structured_output: StructuredOutputManager | None,
        draft_control: DraftControl | None,
    ) -> None:
        self._rows = rows
        self._kv = kv_cache_manager
        self._encoder_cache = encoder_cache_manager
        self._client_outputs = client_outputs
        self._stats = stats
        self._structured_output = structured_output
        self._draft_control = draft_control

    def take_in(
        self, batch: StepBatch, drafts: Mapping[str, list[int]], model_output: ModelRunnerOutput, now_s: float
    ) -> list[Ending]:
        """Take in a step, and return the requests that it ends. drafts: what the step verified, by request id."""
        if not len(batch):
            return []
        token_ids = model_output.token_ids_of(batch.req_ids)
        endings = self._take_plain(batch, token_ids)
        results = _Results(batch, token_ids, drafts, model_output, now_s)
        for index in range(batch.num_plain, len(batch)):
            if self._rows.epochs[batch.rows[index]] == batch.epochs[index]:
                ending = self._take_one(results, index)
                if ending is not None:
                    endings.append(ending)
        return endings

    def _take_plain(self, batch: StepBatch, token_ids: np.ndarray) -> list[Ending]:
        """Take in, as arrays, the requests that decoded one token each."""
        rows, num_plain = self._rows, batch.num_plain
        indices, tokens = batch.rows[:num_plain], token_ids[:num_plain, 0]
        num_computed = batch.num_computed_tokens[:num_plain] + 1
        is_live = rows.epochs[indices] == batch.epochs[:num_plain]
        if not is_live.all():
            indices, tokens, num_computed = indices[is_live], tokens[is_live], num_computed[is_live]
        if not len(indices):
            return []
        if (tokens == NO_TOKEN).any():
            raise IntegrityError("a request decoded in this step, and no token was sampled for it")
        num_tokens = num_computed + 1
        for all_token_ids, token_id in zip(rows.token_lists[indices].tolist(), tokens.tolist(), strict=True):
            all_token_ids.append(token_id)
        rows.num_expected[indices] = np.maximum(rows.num_expected[indices], num_tokens)
        self._stats.num_output_tokens += len(indices)
        for index in (num_computed % self._kv.block_size == 0).nonzero()[0].tolist():
            # The step has ended and filled a block, so other requests can share the block's KV.
            self._kv.cache_blocks(rows.requests[indices[index]], int(num_computed[index]))
        return self._report_plain(indices, tokens, num_tokens)

    def _report_plain(self, indices: np.ndarray, tokens: np.ndarray, num_tokens: np.ndarray) -> list[Ending]:
        """Report the requests that go on, and return the ends of the requests that their token completes."""
        rows = self._rows
        positions = num_tokens - 1 - rows.num_prompt[indices]
        may_stop = (tokens[:, None] == rows.stop_token_ids[indices]).any(axis=1)
        may_stop |= num_tokens >= rows.max_num_tokens[indices]
        endings: list[Ending] = []
        if may_stop.any():
            goes_on = np.ones(len(indices), dtype=bool)
            for index in may_stop.nonzero()[0].tolist():
                request: Request = rows.requests[indices[index]]
                if (stop := find_stop(request)) is not None:
                    goes_on[index] = False
                    endings.append(_completed(request, stop, [int(tokens[index])]))
            indices, tokens, positions = indices[goes_on], tokens[goes_on], positions[goes_on]
        if len(indices):
            self._client_outputs.add_decoded(
                rows.client_index[indices], rows.req_ids[indices], rows.attempt[indices], positions, tokens
            )
        return endings

    def _take_one(self, results: _Results, index: int) -> Ending | None:
        """Take in a request whose prompt was computed, or that needs a look for another reason."""
        rows, row = self._rows, int(results.batch.rows[index])
        request: Request = rows.requests[row]
        token_ids = [token_id for token_id in results.token_ids[index].tolist() if token_id != NO_TOKEN]
        num_new_tokens = int(results.batch.num_new_tokens[index])
        num_computed_tokens = int(results.batch.num_computed_tokens[index]) + num_new_tokens
        self._check_that_a_due_token_came(request, token_ids, results, index)
        num_computed_tokens -= self._reject_drafts(request, len(token_ids), results.drafts)
        num_earlier_tokens = request.num_tokens
        stop = _append_until_stop(request, token_ids)
        rows.num_expected[row] = max(int(rows.num_expected[row]), request.num_tokens)
        if num_computed_tokens % self._kv.block_size < num_new_tokens:
            self._kv.cache_blocks(request, num_computed_tokens)
        if int(results.batch.num_computed_tokens[index]) < request.num_prompt_tokens <= num_computed_tokens:
            self._end_prompt(request)
        if request.mm_features:
            self._pass_inputs(request, num_computed_tokens)
        new_token_ids = request.all_token_ids[num_earlier_tokens:]
        if request.pooling_params is not None and num_computed_tokens == request.num_prompt_tokens:
            return _with_vector(request, results)
        if not new_token_ids:
            return None
        if error := find_objection(self._structured_output, request, new_token_ids):
            cause = EndCause.REQUEST_AT_FAULT if request.sampling_params.has_token_rules else None
            return Ending(request, RequestStatus.FINISHED_ERROR, error, cause)
        return self._report_tokens(request, new_token_ids, stop, results)

    @staticmethod
    def _check_that_a_due_token_came(request: Request, token_ids: Sequence[int], results: _Results, index: int) -> None:
        """Raise IntegrityError if the step has computed all of a request's tokens, or its drafts, and sampled none.

        Such a request would wait for its next token for ever: every token that it has is computed.
        """
        batch = results.batch
        num_computed_tokens = int(batch.num_computed_tokens[index] + batch.num_new_tokens[index])
        num_expected_tokens = request.num_prompt_tokens + int(batch.num_output_tokens[index])
        if request.pooling_params is None and not token_ids and num_computed_tokens >= num_expected_tokens:
            raise IntegrityError(f"{request.request_id}: all its tokens are computed, and no token was sampled for it")

    def _end_prompt(self, request: Request) -> None:
        """Offer the tail of a computed prompt to requests with the same prompt, while this one holds its blocks."""
        if request.transfer_role is not TransferRole.PRODUCER and request.pooling_params is None:
            self._kv.offer_prompt_tail(request)

    def _pass_inputs(self, request: Request, num_computed_tokens: int) -> None:
        """Let go of the multimodal items that the request's computed tokens have passed."""
        for input_id in self._encoder_cache.get_cached_input_ids(request):
            if request.mm_features[input_id].end <= num_computed_tokens:
                self._encoder_cache.free_encoder_input(request, input_id)

    def _reject_drafts(self, request: Request, num_tokens: int, drafts: Mapping[str, list[int]]) -> int:
        """Take back the drafts that the step did not accept; their KV is computed over. Returns how many."""
        drafted = drafts.get(request.request_id)
        if not num_tokens or not drafted:
            return 0
        num_accepted = num_tokens - 1
        self._count_drafts(len(drafted), num_accepted)
        if self._draft_control is not None:
            self._draft_control.learn(request.row, len(drafted), num_accepted)
        num_rejected = len(drafted) - num_accepted
        self._rows.num_computed[request.row] -= num_rejected
        return num_rejected

    def _count_drafts(self, num_drafted: int, num_accepted: int) -> None:
        stats = self._stats.spec_decoding_stats
        if stats is None:  # Drafts came without a configured drafter.
            stats = self._stats.spec_decoding_stats = SpecDecodingStats(num_drafted)
        stats.num_drafts += 1
        stats.num_draft_tokens += num_drafted
        stats.num_accepted_tokens += num_accepted
        positions = stats.num_accepted_tokens_per_pos
        positions += [0] * (num_drafted - len(positions))
        for position in range(num_accepted):
            positions[position] += 1

    def _report_tokens(
        self, request: Request, token_ids: list[int], stop: RequestStatus | None, results: _Results
    ) -> Ending | None:
        """Report a request's new tokens; if they complete the request, or it is handed over, return its end instead."""
        logprobs = results.model_output.logprobs.get(request.request_id)
        logprobs = None if logprobs is None else logprobs[: len(token_ids)]
        prompt_logprobs = results.model_output.prompt_logprobs_dict.get(request.request_id)
        self._stats.num_output_tokens += len(token_ids)
        if request.first_token_at_s is None:
            request.first_token_at_s = results.now_s
        if stop is not None:
            return _completed(request, stop, token_ids, logprobs, prompt_logprobs)
        if request.transfer_role is TransferRole.PRODUCER:
            return Ending(
                request,
                RequestStatus.FINISHED_LENGTH_CAPPED,
                cause=EndCause.HANDED_OVER,
                new_token_ids=token_ids,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                producer_end=ProducerEnd.HANDED_OVER,
                first_token_id=token_ids[0],
            )
        self._client_outputs.add_tokens(request, token_ids, logprobs, prompt_logprobs)
        return None


@dataclass(frozen=True, slots=True)
class _Results:
    """A step and its results. token_ids: sampled tokens in batch order, as in ModelRunnerOutput."""

    batch: StepBatch
    token_ids: np.ndarray
    drafts: Mapping[str, list[int]]
    model_output: ModelRunnerOutput
    now_s: float


def _append_until_stop(request: Request, token_ids: list[int]) -> RequestStatus | None:
    """Append sampled tokens up to the one that ends the request; return its end, if any does."""
    for token_id in token_ids:
        request.append_output_token_ids(token_id)
        if (stop := find_stop(request)) is not None:
            return stop
    return None


def _completed(
    request: Request,
    stop: RequestStatus,
    token_ids: list[int],
    logprobs: list[TokenLogprobs] | None = None,
    prompt_logprobs: list[TokenLogprobs] | None = None,
) -> Ending:
    """Return the end of a request that its new tokens complete."""
    return Ending(
        request,
        stop,
        new_token_ids=token_ids,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        producer_end=ProducerEnd.FINISHED_HERE,
    )


def _with_vector(request: Request, results: _Results) -> Ending:
    """Return the end of a pooling request."""
    vector = results.model_output.pooler_output.get(request.request_id)
    if vector is None:
        raise IntegrityError(
            f"{request.request_id}: its whole prompt is computed, and the worker has returned no vector"
        )
    return Ending(request, RequestStatus.FINISHED_STOPPED, pooling_output=vector)
