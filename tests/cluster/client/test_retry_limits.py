"""How long to leave an ingress alone, and what is left of a caller's time."""

from __future__ import annotations

import random

from cluster.client.retry_limits import Deadline, retry_delay_s


def test_what_an_ingress_says_is_waited_for_and_not_by_all_to_the_same_moment() -> None:
    rng = random.Random(1)
    delays = [retry_delay_s(2.0, 1, rng) for _ in range(200)]
    assert min(delays) >= 2.0
    assert max(delays) <= 3.0
    assert max(delays) - min(delays) > 0.9


def test_without_a_word_waits_double_up_to_a_bound() -> None:
    rng = random.Random(1)
    means = [sum(retry_delay_s(None, num, rng) for _ in range(400)) / 400 for num in (1, 2, 3, 9, 10_000)]
    assert [round(mean, 1) for mean in means] == [0.2, 0.4, 0.8, 2.0, 2.0]


def test_a_deadline_caps_what_comes_later() -> None:
    deadline = Deadline(5.0, now_s=100.0)
    assert (deadline.left_s(102.0), deadline.cap(10.0, 102.0), deadline.cap(1.0, 102.0)) == (3.0, 3.0, 1.0)
    assert (deadline.is_over(104.9), deadline.is_over(105.0), deadline.left_s(200.0)) == (False, True, 0.0)
    without = Deadline(None, now_s=100.0)
    assert (without.left_s(1e9), without.cap(7.0, 1e9), without.is_over(1e9)) == (None, 7.0, False)
