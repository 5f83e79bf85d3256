"""When a request is complete."""

from __future__ import annotations

from actors.core.requests.request import Request
from actors.core.requests.request_status import RequestStatus


def find_stop(request: Request) -> RequestStatus | None:
    """Return the status in which the request ends with the tokens that it has, or None if it goes on.

    EOS and stop tokens come before the length, so a last token that is both counts as a stop. Below min_tokens neither
    of them stops; the sampler should not have sampled them.
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
    """Whether the output's last tokens are one pattern again and again, as often as the request gives up at."""
    params, tokens = request.sampling_params, request.all_token_ids
    for size in range(1, params.repetition_max_pattern + 1):
        num_repeated = size * params.repetition_min_count
        if num_repeated > request.num_output_tokens:
            return False
        # Equal to itself, moved by the pattern's size: all of it is that pattern.
        if tokens[-num_repeated:-size] == tokens[len(tokens) - num_repeated + size :]:
            return True
    return False
