"""Windows of offered load, at an ingress and in the controller."""

from __future__ import annotations

import msgspec

from cluster.planning.offered_load import SAMPLES_PER_WINDOW, LoadHistory, LoadWindow, OfferedLoad, OfferedRequest

ENDED = OfferedRequest(arrived_at_s=95.0, num_prompt_tokens=1000, num_cached_tokens=400, num_output_tokens=11)


def test_arrivals_count_when_they_come_and_outputs_when_they_end() -> None:
    load = OfferedLoad(30.0, now_s=60.0)
    load.arrive(95.0, 1000)
    load.arrive(96.0)
    load.refuse(96.0)
    load.end(ENDED, 125.0)
    first, second = load.since(0, 150.0)
    assert first == LoadWindow(3, num_offered=2, num_refused=1, num_sized=1, num_prompt_tokens=1000)
    assert second == LoadWindow(
        4,
        num_ended=1,
        num_ended_prompt_tokens=1000,
        num_computed_tokens=600,
        num_prefill_pairs=600 * 700,
        num_decode_steps=10,
        num_decode_context_tokens=10 * 1005.5,
        sample=(ENDED,),
    )


def test_windows_without_requests_are_told_but_not_the_one_under_way() -> None:
    load = OfferedLoad(30.0, now_s=45.0)
    assert [window.number for window in load.since(0, 149.0)] == [2, 3]
    assert load.since(3, 149.0) == [LoadWindow(3)]


def test_only_the_last_hour_is_kept() -> None:
    load = OfferedLoad(30.0, now_s=0.0)
    for number in range(500):
        load.arrive(30.0 * number)
    assert [window.number for window in load.since(0, 500 * 30.0)] == list(range(380, 500))
    assert len(load._windows) == 121


def test_of_many_requests_a_sample_is_kept_and_all_are_counted() -> None:
    load = OfferedLoad(30.0, now_s=0.0)
    for index in range(1000):
        load.end(msgspec.structs.replace(ENDED, arrived_at_s=30.0 + index / 100), 45.0)
    [window] = load.since(0, 60.0)
    assert window.num_ended == 1000
    assert len(window.sample) == SAMPLES_PER_WINDOW
    arrivals = [one.arrived_at_s for one in window.sample]
    assert arrivals == sorted(arrivals)
    assert arrivals[0] < 32 < 38 < arrivals[-1], "the sample is from the whole window"


def test_windows_of_ingresses_are_added() -> None:
    history = LoadHistory(30.0)
    history.take("ingress-0", [LoadWindow(3, num_offered=2), LoadWindow(4, num_offered=5, sample=(ENDED,))])
    history.take("ingress-1", [LoadWindow(3, num_offered=1), LoadWindow(4, num_offered=1, num_prefill_pairs=2.5)])
    assert history.windows(["ingress-0", "ingress-1"], 160.0) == [
        LoadWindow(3, num_offered=3),
        LoadWindow(4, num_offered=6, num_prefill_pairs=2.5, sample=(ENDED,)),
    ]


def test_a_window_that_is_told_twice_counts_once() -> None:
    history = LoadHistory(30.0)
    for _ in range(2):
        history.take("ingress-0", [LoadWindow(3, num_offered=2)])
    assert history.windows(["ingress-0"], 130.0) == [LoadWindow(3, num_offered=2)]


def test_a_window_that_an_ingress_has_not_told_is_not_complete() -> None:
    history = LoadHistory(30.0)
    history.take("ingress-0", [LoadWindow(3, num_offered=2), LoadWindow(4, num_offered=2)])
    history.take("ingress-1", [LoadWindow(3, num_offered=2)])
    assert [one.number for one in history.windows(["ingress-0", "ingress-1"], 160.0)] == [3]
    assert history.windows(["ingress-0", "ingress-1", "ingress-2"], 160.0) == [], "one has told nothing at all"


def test_what_an_ingress_that_left_has_told_stays_part_of_the_load() -> None:
    history = LoadHistory(30.0)
    history.take("ingress-0", [LoadWindow(3, num_offered=2), LoadWindow(4, num_offered=2)])
    history.take("ingress-1", [LoadWindow(3, num_offered=7)])
    assert [one.num_offered for one in history.windows(["ingress-0"], 160.0)] == [9, 2]


def test_an_ingress_that_begins_later_does_not_void_earlier_windows() -> None:
    history = LoadHistory(30.0)
    history.take("ingress-0", [LoadWindow(number, num_offered=1) for number in (3, 4, 5)])
    history.take("ingress-1", [LoadWindow(5, num_offered=1)])
    assert [one.num_offered for one in history.windows(["ingress-0", "ingress-1"], 190.0)] == [1, 1, 2]


def test_old_windows_are_forgotten() -> None:
    history = LoadHistory(30.0)
    history.take("ingress-0", [LoadWindow(3), LoadWindow(200)])
    assert [one.number for one in history.windows(["ingress-0"], 201 * 30.0)] == [200]
    assert history.newest == {"ingress-0": 200}
