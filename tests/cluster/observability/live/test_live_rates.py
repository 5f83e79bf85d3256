from __future__ import annotations

import pytest

from cluster.observability.live.live_rates import LiveRates
from tests.cluster.observability.live.engines import link, totals


def test_a_rate_is_the_growth_within_the_last_seconds() -> None:
    rates = LiveRates()
    for at_s, num_tokens in [(0.0, 0), (1.0, 10), (2.0, 20), (3.0, 120), (4.0, 220)]:
        live = rates.update([totals("decode-0", at_s, tokens=num_tokens, steps=num_tokens // 10)])
    [engine] = live.engines
    assert engine.output_tokens_per_s == 100.0
    assert engine.step_s == pytest.approx(0.1)


def test_the_first_sample_has_no_rates_but_all_counts() -> None:
    [engine] = LiveRates().update([totals("decode-0", tokens=1000, running=2, free=25)]).engines
    assert (engine.output_tokens_per_s, engine.step_s, engine.num_running, engine.kv_used) == (None, None, 2, 0.75)


def test_a_sample_that_is_read_twice_counts_once() -> None:
    rates = LiveRates()
    rates.update([totals("decode-0", 0.0)])
    rates.update([totals("decode-0", 1.0, tokens=100)])
    [engine] = rates.update([totals("decode-0", 1.01, tokens=100)]).engines
    assert engine.output_tokens_per_s == 100.0


def test_a_new_incarnation_begins_without_rates() -> None:
    rates = LiveRates()
    rates.update([totals("decode-0", 0.0, tokens=1000)])
    rates.update([totals("decode-0", 1.0, tokens=1100)])
    [engine] = rates.update([totals("decode-0", 2.0, tokens=5, incarnation=2)]).engines
    assert engine.output_tokens_per_s is None


def test_counters_that_went_back_begin_anew() -> None:
    rates = LiveRates()
    rates.update([totals("decode-0", 0.0, tokens=1000)])
    [engine] = rates.update([totals("decode-0", 1.0, tokens=5)]).engines
    assert engine.output_tokens_per_s is None


def test_an_engine_without_counters_is_shown_without_them() -> None:
    [engine] = LiveRates().update([totals("decode-0", None)]).engines
    assert (engine.has_stats, engine.engine_id) == (False, "decode-0")


def test_a_queue_lasts_only_if_every_sample_has_it() -> None:
    rates = LiveRates()
    for at_s, num_waiting, num_held in [(0.0, 3, 1), (1.0, 5, 0), (2.0, 4, 2)]:
        live = rates.update([totals("decode-0", at_s, waiting=num_waiting, held=num_held)])
    [engine] = live.engines
    assert (engine.num_waiting, engine.num_lasting_waiting, engine.num_lasting_held) == (4, 3, 0)


@pytest.mark.parametrize("is_producer_first", [False, True])
def test_a_link_is_listed_once_with_the_bytes_that_its_consumer_counted(is_producer_first: bool) -> None:
    rates = LiveRates()
    for at_s, sent, received in [(0.0, 0, 0), (2.0, 9000, 4000)]:
        engines = [
            totals("prefill-0", at_s, links=(link(sent, is_of_consumer=False),)),
            totals("decode-0", at_s, links=(link(received, active=1),)),
        ]
        live = rates.update(engines if is_producer_first else engines[::-1])
    [found] = live.links
    assert (found.producer_id, found.consumer_id, found.bytes_per_s) == ("prefill-0", "decode-0", 2000.0)
    assert found.num_active_transfers == 1


def test_a_link_that_was_made_anew_has_no_rate_yet() -> None:
    rates = LiveRates()
    rates.update([totals("decode-0", 0.0, links=(link(5000),))])
    [found] = rates.update([totals("decode-0", 1.0, links=(link(10),))]).links
    assert found.bytes_per_s is None


def test_engines_that_have_left_are_forgotten() -> None:
    rates = LiveRates()
    rates.update([totals("decode-0", 0.0, tokens=0)])
    rates.update([])
    [engine] = rates.update([totals("decode-0", 1.0, tokens=100)]).engines
    assert engine.output_tokens_per_s is None
