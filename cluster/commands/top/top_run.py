"""Runs `raypd top`: asks for the status again and again, takes keys, and keeps the screen drawn."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Final

from rich.console import Console
from rich.live import Live

from cluster.client import CallFailed, GenerateClient
from cluster.commands.top.top_keys import pressed_keys
from cluster.commands.top.top_screen import render
from cluster.commands.top.top_state import Action, Drain, Quit, SetRole, TopState
from cluster.errors import InvalidConfig
from cluster.observability.stories.make_story import make_story
from cluster.routing.request_record import RequestRecord

_ONCE_HEIGHT: Final = 1000
_NUM_FINISHED: Final = 20
_MAX_ASKED: Final = 200
"""Requests in flight are among the last ones: for the finished ones, as many more are asked for, up to this."""


async def show_top(address: str, console: Console, *, interval_s: float, timeout_s: float, is_once: bool) -> None:
    """Show the cluster until q or Ctrl-C is pressed. Raises ClusterError if the first call fails.

    interval_s: seconds between two refreshes
    is_once:    print the screen once, after two refreshes, which the rates need; no terminal is needed
    """
    if not is_once and not (sys.stdin.isatty() and console.is_terminal):
        raise InvalidConfig("raypd top", ["it needs a terminal: use --once, or raypd status --watch"])
    async with GenerateClient(address) as client:
        state = TopState()
        await _refresh(client, state, timeout_s)
        if is_once:
            await asyncio.sleep(interval_s)
            await _refresh(client, state, timeout_s)
            console.print(render(state, console.width, _ONCE_HEIGHT))
            return
        await _Top(client, console, state, timeout_s).run(interval_s)


async def _refresh(client: GenerateClient, state: TopState, timeout_s: float) -> None:
    """Ask for the status and for the last finished requests. Raises CallFailed if there is no status."""
    state.update(await client.status(timeout_s), time.monotonic())
    try:
        last = min(_MAX_ASKED, _NUM_FINISHED + len(state.status.requests))
        found = await client.explain(last=last, timeout_s=timeout_s)
    except CallFailed as error:
        # A cluster may keep no records of requests.
        state.take_finished((), str(error))
        return
    records = [RequestRecord.from_json(one) for one in found.records]
    state.take_finished([make_story(one) for one in records if one.outcome is not None][-_NUM_FINISHED:])


class _Top:
    """The running command."""

    def __init__(self, client: GenerateClient, console: Console, state: TopState, timeout_s: float) -> None:
        self._client = client
        self._console = console
        self._state = state
        self._timeout_s = timeout_s
        self._changed = asyncio.Event()
        self._has_quit = False
        self._actions: asyncio.Queue[Drain | SetRole] = asyncio.Queue()

    async def run(self, interval_s: float) -> None:
        with (
            Live(console=self._console, auto_refresh=False, screen=True) as live,
            pressed_keys(self._press),
        ):
            async with asyncio.TaskGroup() as tasks:
                following = [tasks.create_task(self._follow(interval_s)), tasks.create_task(self._act())]
                while not self._has_quit:
                    width, height = self._console.size
                    live.update(render(self._state, width, height), refresh=True)
                    await self._changed.wait()
                    self._changed.clear()
                for task in following:
                    task.cancel()

    async def _follow(self, interval_s: float) -> None:
        """Take a status every interval_s seconds. The ingress may be replaced at its address meanwhile."""
        while True:
            await asyncio.sleep(interval_s)
            try:
                await _refresh(self._client, self._state, self._timeout_s)
            except CallFailed as error:
                self._state.fail(str(error))
            self._changed.set()

    async def _act(self) -> None:
        """Do what was confirmed, one after the other."""
        while True:
            action = await self._actions.get()
            try:
                if isinstance(action, Drain):
                    await self._client.drain(action.engine_id, timeout_s=self._timeout_s)
                else:
                    await self._client.set_role(action.engine_id, action.role.value, self._timeout_s)
                self._state.message = f"done: {action}"
            except CallFailed as error:
                self._state.message = f"failed: {action}: {error}"
            self._changed.set()

    def _press(self, key: str) -> None:
        action: Action | None = self._state.press(key)
        if isinstance(action, Quit):
            self._has_quit = True
        elif action is not None:
            self._actions.put_nowait(action)
        self._changed.set()
