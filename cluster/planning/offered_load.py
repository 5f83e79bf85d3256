"""Notes what clients have asked for, in windows of time: requests that were refused count as well.

An ingress keeps the windows of the last hour, and the controller asks it for those since the last ones that it has. So
a controller that was restarted finds an hour's load at the ingresses, and one that asks twice counts nothing twice.

Arrivals and prompts belong to the window in which they arrived. Output lengths and cached tokens are known only at a
request's end, so they belong to the window of the end: the requests that arrived in the newest window and have already
ended are the short ones, and their mean would be too low.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

KEPT_S: Final = 3600.0
"""Windows are kept for this many seconds."""
SAMPLES_PER_WINDOW: Final = 64


class OfferedRequest(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request that has ended. arrived_at_s: Unix time; num_cached_tokens: tokens of the prompt whose KV was cached"""

    arrived_at_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int

    @property
    def num_computed_tokens(self) -> int:
        """Tokens of the prompt that an engine had to compute; at least 1."""
        return max(self.num_prompt_tokens - self.num_cached_tokens, 1)

    @property
    def num_known_tokens(self) -> int:
        """Tokens of the prompt whose KV is there when the computation begins."""
        return self.num_prompt_tokens - self.num_computed_tokens

    @property
    def num_prefill_pairs(self) -> float:
        """Pairs of a query and a key in the prompt's attention, as in StepShape."""
        computed = self.num_computed_tokens
        return computed * (self.num_known_tokens + computed / 2)

    @property
    def num_decode_context_tokens(self) -> float:
        """The tokens before each output token, summed over the steps that decode; the prompt's step gives the first."""
        return self.num_decode_steps * (self.num_prompt_tokens + self.num_output_tokens / 2)

    @property
    def num_decode_steps(self) -> int:
        """How many steps decode the request."""
        return max(self.num_output_tokens - 1, 0)


class LoadWindow(msgspec.Struct, frozen=True):
    """The load of one window of time.

    number:       the window's begin in Unix time, divided by its length
    num_offered:  requests that came, refused ones included
    num_refused:  those that the ingress refused
    num_sized:    those whose prompt's length is known; num_prompt_tokens is the sum of these lengths
    num_ended:    requests that ended in this window with an output; the sums below are over them
    sample:       some of these, drawn at random if there are many
    """

    number: int
    num_offered: int = 0
    num_refused: int = 0
    num_sized: int = 0
    num_prompt_tokens: int = 0
    num_ended: int = 0
    num_ended_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    num_prefill_pairs: float = 0.0
    num_decode_steps: int = 0
    num_decode_context_tokens: float = 0.0
    sample: tuple[OfferedRequest, ...] = ()


class OfferedLoad:
    """The windows of one ingress. One thread uses it."""

    def __init__(self, window_s: float, now_s: float, seed: int = 0) -> None:
        """window_s: the length of a window; now_s: Unix time; seed: of the draws of samples"""
        self.window_s = window_s
        self._first = int(now_s // window_s) + 1
        self._random = random.Random(seed)
        self._windows: OrderedDict[int, _Sums] = OrderedDict()

    def arrive(self, now_s: float, num_prompt_tokens: int | None = None) -> None:
        """Note that a request has come. now_s: Unix time; num_prompt_tokens: None if they were not counted"""
        sums = self._at(now_s)
        sums.num_offered += 1
        if num_prompt_tokens is not None:
            sums.num_sized += 1
            sums.num_prompt_tokens += num_prompt_tokens

    def refuse(self, now_s: float) -> None:
        """Note that a request that has come was refused. now_s: Unix time"""
        self._at(now_s).num_refused += 1

    def end(self, request: OfferedRequest, now_s: float) -> None:
        """Note that a request has ended with an output. now_s: Unix time"""
        self._at(now_s).end(request, self._random)

    def since(self, number: int, now_s: float) -> list[LoadWindow]:
        """Return the complete windows from this number on, the oldest first, those without requests as well.

        The window in which the ingress began is left out, since it is shorter than others.
        now_s: Unix time; the window that it falls into is not complete
        """
        newest = int(now_s // self.window_s)
        oldest = max(number, newest - int(KEPT_S // self.window_s), self._first)
        return [
            self._windows[one].value(one) if one in self._windows else LoadWindow(one) for one in range(oldest, newest)
        ]

    def _at(self, now_s: float) -> _Sums:
        number = int(now_s // self.window_s)
        sums = self._windows.get(number)
        if sums is None:
            sums = self._windows[number] = _Sums()
            while len(self._windows) > KEPT_S // self.window_s + 1:
                self._windows.popitem(last=False)
        return sums


class LoadHistory:
    """The windows of all ingresses of a cluster, summed, for the last hour.

    A window is complete once every ingress that serves has told it. The load that an incomplete one has is a part of
    the load: it is left out, and is not taken for a low load.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._by_ingress: dict[str, dict[int, LoadWindow]] = {}

    def take(self, ingress: str, windows: Iterable[LoadWindow]) -> None:
        """Take the windows that an ingress has told; a window that is told again replaces the one before."""
        told = self._by_ingress.setdefault(ingress, {})
        told.update((one.number, one) for one in windows)

    @property
    def newest(self) -> dict[str, int]:
        """The number of the newest window that each ingress has told."""
        return {name: max(told) for name, told in self._by_ingress.items() if told}

    def windows(self, serving: Iterable[str], now_s: float) -> list[LoadWindow]:
        """Return the complete windows of the last hour, the oldest first.

        serving: the ingresses that serve now. What others have told, which have left, counts too
        now_s:   Unix time
        """
        oldest = int((now_s - KEPT_S) // self._window_s)
        for told in self._by_ingress.values():
            for number in [number for number in told if number < oldest]:
                del told[number]
        self._by_ingress = {name: told for name, told in self._by_ingress.items() if told}
        begun = {name: min(self._by_ingress[name]) for name in serving if name in self._by_ingress}
        if set(serving) - begun.keys():
            return []  # an ingress has told nothing yet, so every sum would lack its part
        newest = min((max(self._by_ingress[name]) for name in begun), default=-1)
        numbers = sorted({number for told in self._by_ingress.values() for number in told if number <= newest})
        return [
            merged(told[number] for told in self._by_ingress.values() if number in told)
            for number in numbers
            if all(number in self._by_ingress[name] for name, first in begun.items() if first <= number)
        ]


def merged(windows: Iterable[LoadWindow]) -> LoadWindow:
    """Add the windows of several ingresses that have one number; samples are put together."""
    found = list(windows)
    sums: Mapping[str, float] = {
        name: sum(getattr(one, name) for one in found) for name in LoadWindow.__struct_fields__[1:-1]
    }
    sample = tuple(sorted((request for one in found for request in one.sample), key=lambda one: one.arrived_at_s))
    return msgspec.structs.replace(found[0], **sums, sample=sample)


class _Sums:
    """A window that is not complete."""

    def __init__(self) -> None:
        self.num_offered = self.num_refused = self.num_sized = self.num_prompt_tokens = 0
        self.num_ended = self.num_ended_prompt_tokens = self.num_computed_tokens = self.num_decode_steps = 0
        self.num_prefill_pairs = self.num_decode_context_tokens = 0.0
        self.sample: list[OfferedRequest] = []

    def end(self, request: OfferedRequest, draw: random.Random) -> None:
        self.num_ended += 1
        self.num_ended_prompt_tokens += request.num_prompt_tokens
        self.num_computed_tokens += request.num_computed_tokens
        self.num_prefill_pairs += request.num_prefill_pairs
        self.num_decode_steps += request.num_decode_steps
        self.num_decode_context_tokens += request.num_decode_context_tokens
        if len(self.sample) < SAMPLES_PER_WINDOW:
            self.sample.append(request)
        elif (index := draw.randrange(self.num_ended)) < SAMPLES_PER_WINDOW:
            self.sample[index] = request

    def value(self, number: int) -> LoadWindow:
        sums = {name: getattr(self, name) for name in LoadWindow.__struct_fields__[1:-1]}
        sample = tuple(sorted(self.sample, key=lambda one: one.arrived_at_s))
        return LoadWindow(number, **sums, sample=sample)
