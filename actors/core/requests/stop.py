"""Decides when a request is complete."""

from __future__ import annotations

from actors.core.requests.request import Request
from actors.core.requests.request_status import RequestStatus


def find_stop(request: Request) -> RequestStatus | None:
    """Return the status in which the request ends with the tokens that it has, or None if it goes on.

    A last token that is EOS or a stop token counts as a stop, even if it is also the last token that the length limits
    allow. Before min_tokens neither EOS nor a stop token ends the request; the sampler does not sample them there.
    """
    num_output_tokens = request.num_output_tokens
    is_stop_token = num_output_tokens > 0 and request.all_token_ids[-1] in request.stop_token_ids
    if is_stop_token and num_output_tokens >= request.sampling_params.min_tokens:
        return RequestStatus.FINISHED_STOPPED
    if len(request.all_token_ids) >= request.max_num_tokens:
        return RequestStatus.FINISHED_LENGTH_CAPPED
    if request.sampling_params.repetition_max_pattern and num_output_tokens >= request.sampling_params.min_tokens:
        return RequestStatus.FINISHED_STOPPED if ends_in_repetition(request) else None
    return None


def ends_in_repetition(request: Request) -> bool:
    """Whether the output ends in a repeated pattern, as repetition_max_pattern and repetition_min_count define it."""
    params, tokens = request.sampling_params, request.all_token_ids
    for size in range(1, params.repetition_max_pattern + 1):
        num_repeated = size * params.repetition_min_count
        if num_repeated > request.num_output_tokens:
            return False
        # The tail equals itself when shifted by the pattern's size if and only if it repeats the pattern.
        if tokens[-num_repeated:-size] == tokens[len(tokens) - num_repeated + size :]:
            return True
    return False
