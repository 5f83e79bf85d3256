from __future__ import annotations

import random
from contextlib import ExitStack
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import DeadlineUnreachable, Overloaded
from cluster.requests.overload_control import AdmittedRequest, OverloadControl
from tests.cluster.access.test_allowance import Clock


def serve(limits: OverloadControl, clock: Clock, num_prompts: int, num_tokens: int, each_s: float) -> None:
    """Prompts one after another, always two of them waiting."""
    with ExitStack() as stack:
        admitted = [stack.enter_context(limits.enter()) for _ in range(num_prompts + 1)]
        admitted[0].queue(num_tokens, None)
        for done, request in pairwise(admitted):
            request.queue(num_tokens, None)
            clock.now_s += each_s
            done.begin()
        admitted[-1].begin()


def test_the_delay_is_when_the_next_one_will_have_ended() -> None:
    clock = Clock()
    limits = OverloadControl(4, 100, unknown_delay_s=1.5, clock=clock)
    running = [limits.enter() for _ in range(4)]
    with pytest.raises(Overloaded, match=r"4 requests are in flight, which is the limit; retry in 1\.5 s"):
        limits.enter()

    for _ in range(20):  # One ends each half second, and another one comes.
        clock.now_s += 0.5
        running.pop(0).__exit__()
        running.append(limits.enter())
    delays_s = []
    for _ in range(3):
        with pytest.raises(Overloaded) as raised:
            limits.enter()
        delays_s.append(raised.value.retry_delay_s)
    assert delays_s == pytest.approx([0.5, 1.0, 1.5], rel=0.1), "as if they stood in line"


def test_tokens_that_wait_are_bounded_but_one_prompt_may_always_come() -> None:
    clock = Clock()
    limits = OverloadControl(100, 1000, clock=clock)
    with limits.enter() as huge, limits.enter() as small:
        huge.queue(5000, None)
        with pytest.raises(Overloaded, match="5000 tokens of prompts wait, and no more than 1000 may"):
            small.queue(1, None)
        clock.now_s += 5.0
        huge.begin()
        small.queue(1, None)
        assert limits.num_waiting_tokens == 1
    assert (limits.num_waiting_tokens, limits.num_requests) == (0, 0)


def test_the_delay_for_tokens_follows_the_rate_at_which_they_leave() -> None:
    clock = Clock()
    limits = OverloadControl(100, 1000, clock=clock)
    serve(limits, clock, 50, 100, each_s=0.5)
    with limits.enter() as first, limits.enter() as second:
        first.queue(1000, None)
        with pytest.raises(Overloaded) as raised:
            second.queue(400, None)
    assert raised.value.retry_delay_s == pytest.approx(2.0, rel=0.15)


def test_a_deadline_that_cannot_be_met_is_refused_at_once() -> None:
    clock = Clock()
    limits = OverloadControl(100, 100_000, clock=clock)
    serve(limits, clock, 50, 100, each_s=0.5)  # 200 tokens/s
    with limits.enter() as first, limits.enter() as hasty, limits.enter() as patient:
        first.queue(4000, None)
        clock.now_s += 2.0
        with pytest.raises(DeadlineUnreachable, match="the deadline is in 5 s, and the first token is expected in"):
            hasty.queue(100, 5.0)
        patient.queue(100, 15.0)


def test_without_experience_or_a_queue_nobody_is_refused_for_a_deadline() -> None:
    clock = Clock()
    limits = OverloadControl(100, 100_000, clock=clock)
    with limits.enter() as request:
        request.queue(50_000, 0.001)
    serve(limits, clock, 50, 100, each_s=0.5)
    with limits.enter() as request:
        request.queue(50_000, 0.001)


def test_small_prompts_do_not_say_how_long_a_large_one_takes() -> None:
    """Each took half a second, mostly for other reasons; one large prompt showed what is possible."""
    clock = Clock()
    limits = OverloadControl(100, 100_000, clock=clock)
    with limits.enter() as large:
        large.queue(20_000, None)
        clock.now_s += 2.0
        large.begin()
    serve(limits, clock, 50, 10, each_s=0.5)
    with limits.enter() as first, limits.enter() as second:
        first.queue(4000, None)
        clock.now_s += 1.5
        second.queue(4000, 2.0)


@given(seed=st.integers(0, 2**32), num_events=st.integers(0, 200))
def test_whatever_happens_nothing_is_left_over(seed: int, num_events: int) -> None:
    draw, clock = random.Random(seed), Clock()
    limits = OverloadControl(5, 500, clock=clock)
    admitted: list[AdmittedRequest] = []
    delays_s: list[float] = []
    for _ in range(num_events):
        clock.now_s += draw.random()
        try:
            match draw.choice(["enter", "queue", "begin", "leave"]):
                case "enter":
                    admitted.append(limits.enter())
                case "queue" if admitted:
                    draw.choice(admitted).queue(draw.randint(1, 300), draw.choice([None, draw.random() * 10]))
                case "begin" if admitted:
                    draw.choice(admitted).begin()
                case "leave" if admitted:
                    admitted.pop(draw.randrange(len(admitted))).__exit__()
        except Overloaded as refused:
            delays_s.append(refused.retry_delay_s)
        except DeadlineUnreachable:
            pass
        assert limits.num_requests == len(admitted) <= 5
        assert limits.num_waiting_tokens >= 0
    for request in admitted:
        request.__exit__()
    assert (limits.num_requests, limits.num_waiting_tokens) == (0, 0)
    assert all(0 < delay_s <= 60 for delay_s in delays_s)
