"""The machines' tables: complete, and as docs/states.md shows them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kv_transfer.handoff import consumer_machine, producer_machine
from kv_transfer.handoff.consumer_machine import ConsumerState
from kv_transfer.handoff.producer_machine import ProducerState
from kv_transfer.handoff.transition_table import render

_PAGE = Path(__file__).parents[3] / "docs" / "states.md"


@pytest.mark.parametrize("table", [render(producer_machine.TRANSITIONS), render(consumer_machine.TRANSITIONS)])
def test_the_page_of_states_shows_the_table(table: str) -> None:
    assert table in _PAGE.read_text(encoding="utf-8")


def test_every_state_but_the_last_can_be_left_and_every_one_but_the_first_be_reached() -> None:
    left = {state for state, _ in producer_machine.TRANSITIONS}
    reached = {state for row in producer_machine.TRANSITIONS.values() for state in row.next_states}
    assert left == set(ProducerState) - {ProducerState.OVER}
    assert reached == set(ProducerState) - {ProducerState.AWAITING_READY}
    left_here = {state for state, _ in consumer_machine.TRANSITIONS}
    reached_here = {state for row in consumer_machine.TRANSITIONS.values() for state in row.next_states}
    assert left_here == set(ConsumerState) - {ConsumerState.OVER}
    assert reached_here == set(ConsumerState)
