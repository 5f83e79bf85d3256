"""Draw from a seed what clients ask, when, and how long they stay, in an open loop.

Questions are few and visits are many, so that every answer can be known beforehand. What a visit does not want to share
gets a cache salt of its own: its KV is computed and moved, whoever has asked the same before.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from tests.reference import random_prompt

PATIENCE_S: Final = 180.0
"""How long a client waits that is in no hurry. Nothing may take so long, on a busy machine either."""

_PROMPT_LENGTHS: Final = (3, 16, 40, 90, 150, 220)
_ANSWER_LENGTHS: Final = (1, 8, 60, 200, 200)
_PREFIX_LENGTH: Final = 64
TEMPERATURE: Final = 0.9


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt and how to go on from it. sampling_seed: None for greedy."""

    prompt: tuple[int, ...]
    num_tokens: int
    sampling_seed: int | None

    @property
    def sampling(self) -> dict[str, Any]:  # the fields of a protobuf message
        """The fields of raypd.v1.SamplingParams."""
        common = {"max_tokens": self.num_tokens, "ignore_eos": True}
        if self.sampling_seed is None:
            return common | {"temperature": 0.0}
        return common | {"temperature": TEMPERATURE, "seed": self.sampling_seed}


@dataclass(frozen=True, slots=True)
class Visit:
    """One client.

    after_s:        its time after the visit before it
    question:       its index
    shares_prefix:  whether it may use what others have left in prefix caches
    leaves_after_s: when it hangs up, if it has no answer by then; None: it stays
    deadline_s:     the call's deadline
    """

    number: int
    after_s: float
    question: int
    shares_prefix: bool
    leaves_after_s: float | None
    deadline_s: float


def draw_questions(seed: int, num_questions: int) -> list[Question]:
    """Half of them begin with one of two prefixes; a third is sampled."""
    rng = random.Random(f"questions {seed}")
    prefixes = [random_prompt(_PREFIX_LENGTH, seed=rng.randrange(2**31)) for _ in range(2)]
    questions = []
    for number in range(num_questions):
        prefix = rng.choice(prefixes) if number % 2 else []
        prompt = prefix + random_prompt(rng.choice(_PROMPT_LENGTHS), seed=rng.randrange(2**31))
        sampling_seed = rng.randrange(2**31) if number % 3 == 2 else None
        questions.append(Question(tuple(prompt), rng.choice(_ANSWER_LENGTHS), sampling_seed))
    return questions


def draw_visits(seed: int, requests_per_s: float, num_questions: int) -> Iterator[Visit]:
    """A Poisson process without an end."""
    rng = random.Random(f"visits {seed}")
    for number in itertools.count():
        leaves, hurries = rng.random() < 0.1, rng.random() < 0.1
        yield Visit(
            number=number,
            after_s=rng.expovariate(requests_per_s),
            question=rng.randrange(num_questions),
            shares_prefix=rng.random() < 0.4,
            leaves_after_s=rng.choice((0.0, 0.02, 0.1, 0.5)) if leaves else None,
            deadline_s=rng.choice((0.05, 0.2, 0.6, 1.5)) if hurries else PATIENCE_S,
        )
