"""All that one request takes of what its ingress and its token have: admission, waiting tokens, images, time.

A request is admitted, then its prompt is charged and waits, then its first token begins the output, then it ends.
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
    """One request's. deadline_s: its client's, on the event loop's clock"""

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
        """Whether the prompt is known, and no token has come."""
        return self._admitted.is_waiting

    def time_left_s(self) -> float | None:
        """Return how long the client still waits; None for as long as it takes."""
        return None if self.deadline_s is None else self.deadline_s - asyncio.get_running_loop().time()

    def take_images(self, request: EngineCoreRequest) -> None:
        """Take the bytes of its images, in place of those that it had. Raises Overloaded."""
        self._num_image_bytes = self._image_budget.exchange(self._num_image_bytes, request)

    def take_prompt(self, num_tokens: int, num_charged_tokens: int) -> None:
        """Let the prompt wait for its computation, and charge it once, also if the request begins anew.

        num_tokens: those that have to be computed
        Raises Overloaded, DeadlineUnreachable.
        """
        if not self._is_charged:
            self._is_charged = True
            self._allowance.charge(num_charged_tokens)
        self._admitted.queue(num_tokens, self.time_left_s())

    def take_output(self, num_tokens: int) -> None:
        """Charge tokens of the output; the first one ends the wait."""
        self._allowance.charge(num_tokens)
        if num_tokens and self._admitted.is_waiting:
            self._admitted.begin()

    def end_wait(self) -> None:
        """The whole answer is there at once."""
        self._admitted.begin()

    def close(self) -> None:
        """Give back what the images took; admission gives back the rest."""
        self._image_budget.release(self._num_image_bytes)
        self._num_image_bytes = 0


@contextmanager
def open_ledger(
    overload_control: OverloadControl, image_budget: ImageBudget, allowance: Allowance, timeout_s: float | None
) -> Iterator[Ledger]:
    """Admit a request. Raises Overloaded, AllowanceSpent."""
    deadline_s = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
    with overload_control.enter() as admitted, allowance.used():
        ledger = Ledger(admitted, image_budget, allowance, deadline_s)
        try:
            yield ledger
        finally:
            ledger.close()
