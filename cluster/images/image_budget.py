"""Bounds the memory that the images of all requests in flight take in an ingress."""

from __future__ import annotations

from actors.core.requests.request import EngineCoreRequest
from cluster.errors import Overloaded


class ImageBudget:
    """Bytes that encoders are given of images: an ingress keeps them until their requests end, to submit them anew."""

    def __init__(self, max_bytes: int, retry_delay_s: float) -> None:
        self._max_bytes = max_bytes
        self._retry_delay_s = retry_delay_s
        self._num_bytes = 0

    def exchange(self, num_bytes: int, request: EngineCoreRequest) -> int:
        """Take what a request needs in place of what it had; returns it, to be released. Raises Overloaded."""
        num_wanted = sum(item.size_bytes for item in request.encoder_inputs)
        if self._num_bytes - num_bytes + num_wanted > self._max_bytes and num_wanted:
            reason = f"the images in flight have {self._num_bytes >> 20} MiB, and {self._max_bytes >> 20} are allowed"
            raise Overloaded(reason, self._retry_delay_s)
        self._num_bytes += num_wanted - num_bytes
        return num_wanted

    def release(self, num_bytes: int) -> None:
        """The request has ended."""
        self._num_bytes -= num_bytes
