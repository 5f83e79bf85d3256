"""Bounds the memory that the images of all requests in flight take in an ingress."""

from __future__ import annotations

from actors.core.requests.request import EngineCoreRequest
from cluster.errors import Overloaded


class ImageBudget:
    """The bytes of all encoder inputs, which an ingress keeps until their requests end, to submit them again."""

    def __init__(self, max_bytes: int, retry_delay_s: float) -> None:
        self._max_bytes = max_bytes
        self._retry_delay_s = retry_delay_s
        self._num_bytes = 0

    def exchange(self, num_bytes: int, request: EngineCoreRequest) -> int:
        """Count a request's encoder inputs, instead of the num_bytes that it had before; returns their bytes.

        The caller gives these bytes to release() in the end. Raises Overloaded.
        """
        num_wanted = sum(item.size_bytes for item in request.encoder_inputs)
        if self._num_bytes - num_bytes + num_wanted > self._max_bytes and num_wanted:
            reason = f"the images in flight have {self._num_bytes >> 20} MiB, and {self._max_bytes >> 20} are allowed"
            raise Overloaded(reason, self._retry_delay_s)
        self._num_bytes += num_wanted - num_bytes
        return num_wanted

    def release(self, num_bytes: int) -> None:
        """Count the bytes of a request no longer: it has ended."""
        self._num_bytes -= num_bytes
