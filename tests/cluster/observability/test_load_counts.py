"""The counts of requests in flight are kept as they change: nobody counts thousands of requests anew.

Tests of cluster/observability/stopwatch.py.
"""

from __future__ import annotations

import random
from contextlib import ExitStack

from cluster.observability.load_counts import LoadCounts, RequestLoad
from cluster.observability.metrics import ServingMetrics
from cluster.observability.stopwatch import Stopwatch


def test_a_request_runs_from_its_first_token_on() -> None:
    metrics = ServingMetrics()
    watches = [Stopwatch(lambda: 0.0, metrics) for _ in range(3)]
    with ExitStack() as stack:
        for watch in watches:
            stack.enter_context(watch.in_flight())
        watches[0].need("sql")
        watches[1].need("chat")
        assert metrics.in_flight.load() == RequestLoad(3, 0, ("sql", "chat"), ())
        watches[0].count(1)
        watches[0].count(5)
        watches[2].count(2)
        assert metrics.in_flight.load() == RequestLoad(1, 2, ("chat",), ("sql",))
        watches[0].need("sql")
        assert metrics.in_flight.load() == RequestLoad(1, 2, ("chat",), ("sql",)), "another version of the model"
    assert metrics.in_flight.load() == RequestLoad()


def test_the_counts_are_those_of_all_requests_whatever_comes_and_goes() -> None:
    rng, counts = random.Random(3), LoadCounts()
    requests: list[tuple[str, bool]] = []
    for _ in range(500):
        if requests and rng.random() < 0.48:
            adapter, has_tokens = requests.pop(rng.randrange(len(requests)))
            counts.remove(adapter, has_tokens=has_tokens)
        else:
            adapter, has_tokens = rng.choice(("", "a", "b", "c")), rng.random() < 0.5
            counts.add(adapter, has_tokens=has_tokens)
            requests.append((adapter, has_tokens))
        load = counts.load()
        assert (load.num_waiting, load.num_running) == tuple(
            sum(one == has_tokens for _, one in requests) for has_tokens in (False, True)
        )
        for has_tokens, adapters in ((False, load.waiting_adapters), (True, load.running_adapters)):
            assert sorted(adapters) == sorted({name for name, one in requests if name and one == has_tokens})
