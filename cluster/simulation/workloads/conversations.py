"""Draws conversations: each turn's prompt is what was said before and a new message.

Every conversation begins with one of a few system prompts, so its first blocks are shared with other conversations,
and those that follow with its own earlier turns. Turns come at drawn times, whether the answer before has come or not:
the load does not depend on how fast the cluster is.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from cluster.simulation.workloads.drawn_requests import LengthDistribution
from cluster.simulation.workloads.workload_request import HASHED_TOKENS, WorkloadRequest

_CONVERSATION: Final = 1 << 40
"""Ids of blocks: of system prompts below this; then this many for each conversation."""
_TURN: Final = 1 << 24
"""In a conversation: the ids of its whole blocks below this; then one for the last block of each turn."""


@dataclass(frozen=True, slots=True)
class ConversationShape:
    """The distributions from which conversations are drawn.

    system:             lengths of the system prompts
    num_system_prompts: how many there are; each conversation draws one
    messages, answers:  lengths of what a user writes and of what the model answers, in a turn
    mean_turns:         turns of a conversation, at least 1; their number is geometric
    mean_pause_s:       from one turn to the next, exponential
    max_prompt_tokens:  a conversation ends before a turn whose prompt would be longer
    """

    system: LengthDistribution = field(default_factory=lambda: LengthDistribution(1_000))
    num_system_prompts: int = 1
    messages: LengthDistribution = field(default_factory=lambda: LengthDistribution(200, 1.0))
    answers: LengthDistribution = field(default_factory=lambda: LengthDistribution(250, 1.0))
    mean_turns: float = 5.0
    mean_pause_s: float = 30.0
    max_prompt_tokens: int = 128_000

    def __post_init__(self) -> None:
        if not (1 <= self.mean_turns < math.inf and 0 < self.mean_pause_s < math.inf and self.num_system_prompts >= 1):
            raise ValueError(f"{self}: mean_turns and num_system_prompts have to be at least 1, mean_pause_s above 0")


def draw_conversations(begins_s: Iterable[float], shape: ConversationShape, seed: int) -> Iterator[WorkloadRequest]:
    """Yield the turns of all conversations in the order of arrival; the same seed draws the same ones.

    begins_s: when conversations begin, ascending; as many conversations as there are times
    In memory are only the conversations that have begun and not ended.
    """
    system_lengths = shape.system.draw(np.random.default_rng([seed, 0]), shape.num_system_prompts).tolist()
    open_turns: list[tuple[float, int, Iterator[WorkloadRequest], WorkloadRequest]] = []
    for number, begin_s in enumerate(begins_s):
        yield from _until(open_turns, begin_s)
        _push(open_turns, number, _turns(number, begin_s, shape, system_lengths, seed))
    yield from _until(open_turns, math.inf)


def _until(
    open_turns: list[tuple[float, int, Iterator[WorkloadRequest], WorkloadRequest]], end_s: float
) -> Iterator[WorkloadRequest]:
    """Yield the turns that come before end_s."""
    while open_turns and open_turns[0][0] < end_s:
        _, number, turns, request = heapq.heappop(open_turns)
        yield request
        _push(open_turns, number, turns)


def _push(
    open_turns: list[tuple[float, int, Iterator[WorkloadRequest], WorkloadRequest]],
    number: int,
    turns: Iterator[WorkloadRequest],
) -> None:
    """Wait for the next turn of a conversation, if there is one. A conversation has one turn in the heap at most."""
    if (request := next(turns, None)) is not None:
        heapq.heappush(open_turns, (request.arrival_s, number, turns, request))


def _turns(
    number: int, begin_s: float, shape: ConversationShape, system_lengths: list[int], seed: int
) -> Iterator[WorkloadRequest]:
    # A generator of its own: what a conversation says does not depend on the others.
    rng = np.random.default_rng([seed, 1, number])
    system = int(rng.integers(len(system_lengths)))
    num_tokens, now_s = system_lengths[system], begin_s
    for turn in range(int(rng.geometric(1 / shape.mean_turns))):
        num_tokens += int(shape.messages.draw(rng, 1)[0])
        if num_tokens > shape.max_prompt_tokens:
            return
        num_output_tokens = int(shape.answers.draw(rng, 1)[0])
        hashes = _hashes(number, turn, num_tokens, system, system_lengths[system])
        yield WorkloadRequest(f"{number}.{turn}", now_s, num_tokens, num_output_tokens, hashes)
        num_tokens += num_output_tokens
        now_s += float(rng.exponential(shape.mean_pause_s))


def _hashes(number: int, turn: int, num_tokens: int, system: int, num_system_tokens: int) -> tuple[int, ...]:
    """Return the ids of a prompt's blocks: a block that is not full, or that the next turn changes, has an own id."""
    num_shared, num_whole = num_system_tokens // HASHED_TOKENS, num_tokens // HASHED_TOKENS
    own = (number + 1) * _CONVERSATION
    ids = [system * _TURN + block for block in range(num_shared)]
    ids += [own + block for block in range(num_shared, num_whole)]
    if num_tokens % HASHED_TOKENS:
        ids.append(own + _TURN + turn)
    return tuple(ids)
