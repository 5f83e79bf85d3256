"""The progress of one stream of output, over as many calls as it takes. Pure.

For one request, what an ingress sends after n tokens of output, text included, depends only on these tokens, the seed,
the model's version and the adapter's digest. So a further call that has them goes on exactly where the one before was
cut: no text is missing, and none comes twice.
"""

from __future__ import annotations

from typing import Final

import grpc

from cluster.api.protos.raypd.v1 import generate_pb2
from cluster.client.errors import CallFailed

_MAX_REQUEST_ID_CHARS: Final = 128


class StreamProgress:
    """A request, and what the reader of its answer has got so far.

    has_begun: whether the reader has got a response
    has_ended: whether the reader has got the last response
    """

    def __init__(self, request: generate_pb2.GenerateRequest) -> None:
        self._request = generate_pb2.GenerateRequest()
        self._request.CopyFrom(request)
        self._request_id = request.request_id
        self._num_calls = 0
        self.has_begun = False
        self.has_ended = False

    def next_request(self) -> generate_pb2.GenerateRequest:
        """Return the request for the rest of the answer.

        A further call has a request id of its own: the ingress may not know yet that the call before it has ended.
        """
        self._num_calls += 1
        request = generate_pb2.GenerateRequest()
        request.CopyFrom(self._request)
        if self._num_calls > 1 and self._request_id:
            request_id = f"{self._request_id}+{self._num_calls}"
            request.request_id = request_id if len(request_id) <= _MAX_REQUEST_ID_CHARS else ""
        return request

    def take(self, response: generate_pb2.GenerateResponse) -> generate_pb2.GenerateResponse:
        """Take a call's response, and return it as the reader gets it. Raises CallFailed if it is not the next part."""
        expected = len(self._request.output_token_ids)
        if response.token_ids and response.first_position != expected:
            message = f"position {expected} of the output is next, but {response.first_position} came"
            raise CallFailed(grpc.StatusCode.DATA_LOSS, message)
        self._request_id = self._request_id or response.request_id
        self._request.output_token_ids.extend(response.token_ids)
        if response.HasField("seed"):
            self._request.sampling_params.seed = response.seed
        if response.HasField("model_version"):
            self._request.model_version = response.model_version
        if response.HasField("lora_digest"):
            self._request.lora_digest = response.lora_digest
        if self.has_begun:
            response.ClearField("seed")
            response.ClearField("model_version")
            response.ClearField("lora_digest")
        self.has_begun = True
        self.has_ended = response.finish_reason != generate_pb2.FINISH_REASON_UNSPECIFIED
        response.request_id = self._request_id
        return response
