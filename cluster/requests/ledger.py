"""Accounts for what one request uses of its ingress's limits and of its token's allowance.

A request is admitted. Then its prompt is charged and waits, the first token begins the output, and the request ends.
Invariant: when the ledger is closed, the ingress counts nothing for the request any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from actors.core.requests.request import EngineCoreRequest
from cluster.access.allowance import Allowance
from cluster.images.image_budget import ImageBudget
from cluster.requests.overload_control import AdmittedRequest, OverloadControl


class Ledger:
    """The account of what one request uses.

    deadline_s: when the client stops waiting, on the event loop's clock; None if it has no deadline
    """

    def __init__(
        self, admitted: AdmittedRequest, image_budget: ImageBudget, allowance: Allowance, deadline_s: float | None
    ) -> None:
        self._admitted = admitted
        self._image_budget = image_budget
        self._allowance = allowance
        self._num_image_bytes = 0
        self._is_charged = False
        self.deadline_s = deadline_s

    @property
    def is_waiting(self) -> bool:
        """Whether the prompt is queued and no token of the output has come."""
        return self._admitted.is_waiting

    def time_left_s(self) -> float | None:
        """Return how many seconds the client still waits; None if it has no deadline."""
        return None if self.deadline_s is None else self.deadline_s - asyncio.get_running_loop().time()

    def take_images(self, request: EngineCoreRequest) -> None:
        """Reserve the bytes of the request's images, in place of those reserved before. Raises Overloaded."""
        self._num_image_bytes = self._image_budget.exchange(self._num_image_bytes, request)

    def take_prompt(self, num_tokens: int, num_charged_tokens: int) -> None:
        """Queue the prompt, and charge it to the token. A request that starts over is charged only once.

        num_tokens:         tokens that an engine has to compute before the first output token
        num_charged_tokens: tokens that are charged to the client's token
        Raises Overloaded, DeadlineUnreachable.
        """
        if not self._is_charged:
            self._is_charged = True
            self._allowance.charge(num_charged_tokens)
        self._admitted.queue(num_tokens, self.time_left_s())

    def take_output(self, num_tokens: int) -> None:
        """Charge tokens of the output; the first token ends the request's wait."""
        self._allowance.charge(num_tokens)
        if num_tokens and self._admitted.is_waiting:
            self._admitted.begin()

    def end_wait(self) -> None:
        """End the wait of a request for a vector, whose whole answer has come at once."""
        self._admitted.begin()

    def close(self) -> None:
        """Release the bytes of the images; open_ledger() releases the rest."""
        self._image_budget.release(self._num_image_bytes)
        self._num_image_bytes = 0


@contextmanager
def open_ledger(
    overload_control: OverloadControl, image_budget: ImageBudget, allowance: Allowance, timeout_s: float | None
) -> Iterator[Ledger]:
    """Admit a request, and release everything that it used when the context is left.

    timeout_s: how long the client waits from now on
    Raises Overloaded, AllowanceSpent.
    """
    deadline_s = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
    with overload_control.enter() as admitted, allowance.used():
        ledger = Ledger(admitted, image_budget, allowance, deadline_s)
        try:
            yield ledger
        finally:
            ledger.close()
