"""When a request is complete."""

from __future__ import annotations

from actors.core.request import Request
from actors.core.status import RequestStatus


def find_stop(request: Request) -> RequestStatus | None:
    """Return the status in which the request ends with the tokens that it has, or None if it goes on.

    EOS and stop tokens come before the length, so a last token that is both counts as a stop. Below min_tokens neither
    of them stops; the sampler should not have sampled them.
    """
    output = request.output_token_ids
    if output and output[-1] in request.stop_token_ids and len(output) >= request.sampling_params.min_tokens:
        return RequestStatus.FINISHED_STOPPED
    if len(request.all_token_ids) >= request.max_num_tokens:
        return RequestStatus.FINISHED_LENGTH_CAPPED
    return None
