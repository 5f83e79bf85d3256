"""The controller's status is at hand without a call, with its age and the reason if the controller does not answer."""

from __future__ import annotations

import asyncio
from typing import cast

from cluster.api.controller_watch import ControllerWatch
from cluster.api.shared.admin import ClusterAdmin
from cluster.errors import ControllerUnavailable
from cluster.observability.status import ControllerView, EngineView


class Controller:
    """Answers with a number in its status, or not at all."""

    def __init__(self) -> None:
        self.is_up = True
        self.num_questions = 0
        self.was_asked = asyncio.Event()

    async def status(self) -> ControllerView:
        self.num_questions += 1
        self.was_asked.set()
        if not self.is_up:
            raise ControllerUnavailable("ActorDied")
        return ControllerView(engines=(EngineView("e", self.num_questions, "decode", "ready"),))


def watch_of(controller: Controller, interval_s: float = 1000.0) -> ControllerWatch:
    return ControllerWatch(cast("ClusterAdmin", controller), lambda: 50.0, interval_s=interval_s)


async def test_nothing_is_known_before_the_first_answer() -> None:
    newest = watch_of(Controller()).newest
    assert (newest.engines, newest.taken_at_s) == ((), 0.0)
    assert newest.error


async def test_an_answer_is_kept_with_its_time() -> None:
    watch = watch_of(Controller())
    answer = await watch.ask()
    assert watch.newest is answer
    assert (answer.engines[0].incarnation, answer.taken_at_s, answer.error) == (1, 50.0, "")


async def test_a_controller_that_stops_answering_leaves_the_reason_and_the_time_of_its_last_answer() -> None:
    controller = Controller()
    watch = watch_of(controller)
    await watch.ask()
    controller.is_up = False
    await watch.ask()
    assert (watch.newest.engines, watch.newest.taken_at_s) == ((), 50.0)
    assert "ActorDied" in watch.newest.error


async def test_it_is_asked_again_and_again_whatever_it_answers() -> None:
    controller = Controller()
    controller.is_up = False
    watch = watch_of(controller, interval_s=0.0)
    asking = asyncio.create_task(watch.run())
    for _ in range(3):
        controller.was_asked.clear()
        await asyncio.wait_for(controller.was_asked.wait(), timeout=60)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert controller.num_questions >= 3
