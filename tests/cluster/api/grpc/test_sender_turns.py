from __future__ import annotations

import asyncio

from cluster.api.grpc.sender_turns import SenderTurns


async def test_each_sender_has_so_many_turns_at_a_time_and_leaves_nothing_behind() -> None:
    turns, running = SenderTurns(2), list[str]()
    may_end = asyncio.Event()

    async def act(sender: str) -> None:
        async with turns.turn(sender):
            running.append(sender)
            await may_end.wait()

    tasks = [asyncio.create_task(act(sender)) for sender in "aaabb"]
    for _ in range(3):
        await asyncio.sleep(0)
    assert running == ["a", "a", "b", "b"]
    tasks[2].cancel()
    may_end.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert running == ["a", "a", "b", "b"], "one that is given up has had no turn"
    assert not turns._turns
