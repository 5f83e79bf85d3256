"""Tests of actors/model/step_threads.py."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from actors.model.forward import FlatForward
from actors.model.step_threads import StepThreads, num_usable_cores
from tests.actors.model.stepping import Sequence, Stepper, make_runner
from tests.reference import greedy_tokens, random_prompt


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("num_threads", "num_cores", "expected"), [(2, 2, 1), (4, 4, 3), (2, 4, 0), (4, 2, 0), (1, 1, 0)]
)
def test_a_core_is_left_free_where_the_threads_take_all(num_threads: int, num_cores: int, expected: int) -> None:
    assert StepThreads.beside(num_threads, num_cores) == StepThreads(num_threads, expected)
    assert num_usable_cores() >= 1


@pytest.mark.usefixtures("threads")
def test_only_a_step_of_one_token_has_fewer_threads_and_only_while_it_is_computed() -> None:
    torch.set_num_threads(3)
    threads = StepThreads.beside(3, 3)
    for num_tokens, expected in ((1, 2), (2, 3), (0, 3)):
        with threads.for_step(num_tokens):
            assert torch.get_num_threads() == expected
        assert torch.get_num_threads() == 3
    with pytest.raises(ZeroDivisionError), threads.for_step(1):
        _ = 1 // 0
    assert torch.get_num_threads() == 3
    assert str(threads) == "; 2 for a step of one token"
    assert not str(StepThreads(3))


@pytest.mark.usefixtures("threads")
def test_the_number_stays_where_it_would_change_the_results() -> None:
    torch.set_num_threads(2)
    threads = StepThreads.beside(2, 2)
    assert threads.tried(lambda: torch.ones(3), partial(next, itertools.count())) == threads
    count = itertools.count()
    assert threads.tried(lambda: torch.full((3,), next(count) * 1e-9)) == StepThreads(2)
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("all_s", "is_left_free"), [(1.0, True), (0.9, True), (0.8, False), (0.5, False)])
def test_all_threads_compute_where_they_are_faster_by_a_good_part(all_s: float, is_left_free: bool) -> None:
    torch.set_num_threads(2)
    now_s = 0.0

    def compute() -> torch.Tensor:
        nonlocal now_s
        # Other work slows down a step now and then; so the fastest of each is compared.
        now_s += (all_s if torch.get_num_threads() == 2 else 1.0) + next(delays)
        return torch.ones(3)

    delays = itertools.cycle([2.0, 0.0, 0.0, 0.3])
    threads = StepThreads.beside(2, 2)
    assert threads.tried(compute, lambda: now_s) == (threads if is_left_free else StepThreads(2))
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("threads")
def test_short_steps_are_tried_until_what_starts_beside_the_engine_is_over() -> None:
    torch.set_num_threads(2)
    now_s, busy = 0.0, [0.03] * 4

    def compute() -> torch.Tensor:
        nonlocal now_s
        is_all = torch.get_num_threads() == 2
        now_s += (0.01 if is_all else 0.02) + (busy.pop() if is_all and busy else 0.0)
        return torch.ones(3)

    assert StepThreads.beside(2, 2).tried(compute, lambda: now_s) == StepThreads(2)


@pytest.mark.usefixtures("threads")
def test_a_request_alone_is_decoded_with_a_core_left_free(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = checkpoint("llama")
    runner = make_runner(directory)
    torch.set_num_threads(2)
    runner.threads = StepThreads.beside(2, 2)
    runner.warm_up()
    # warm_up() has undone it where another processor adds up in another order with one thread, or where two are faster.
    runner.threads = StepThreads.beside(2, 2)
    used: list[tuple[int, int]] = []
    compute = FlatForward.__call__

    def noting(forward: FlatForward, input_ids: torch.Tensor, *arguments: object) -> torch.Tensor:
        used.append((len(input_ids), torch.get_num_threads()))
        return compute(forward, input_ids, *arguments)  # type: ignore[arg-type]  # the arguments are handed on

    monkeypatch.setattr(FlatForward, "__call__", noting)
    stepper = Stepper(runner)
    stepper.add("alone", Sequence(random_prompt(9)))
    assert stepper.run(num_output_tokens=4) == {"alone": greedy_tokens(directory, tuple(random_prompt(9)), 4)}
    assert used == [(9, 2), (1, 1), (1, 1), (1, 1)]
