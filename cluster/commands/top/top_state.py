"""The state of `raypd top`: the newest status, the rates and histories made of it, and what the keys have chosen.

Nothing here reads a clock, a terminal or the network: statuses and keys go in, and actions come out. An action that
changes the cluster comes out only after its confirmation.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias, TypeVar

from cluster.api.protos.raypd.v1 import admin_pb2
from cluster.commands.top.proto_totals import totals_in
from cluster.observability.live.bottleneck import Bottleneck, find_bottleneck
from cluster.observability.live.live_rates import LiveCluster, LiveEngine, LiveRates
from cluster.observability.stories.request_story import RequestStory
from cluster.routing.engine_connection import EngineRole

HISTORY: Final = 120
"""How many refreshes the sparklines go back."""
_MAX_FILTER: Final = 64
ROLE_KEYS: Final = {role.value[0]: role for role in EngineRole}
"""The key of each role: the first letter of its name."""


class Mode(enum.Enum):
    """The meaning of the keys now."""

    TABLE = enum.auto()
    HELP = enum.auto()
    FILTER = enum.auto()
    ROLE = enum.auto()
    CONFIRM = enum.auto()


class Order(enum.Enum):
    """The orders of the engines' table, by the key s."""

    NAME = "name"
    WAITING = "waiting"
    KV = "KV"
    TOKENS = "tokens/s"


class RequestOrder(enum.Enum):
    """The orders of the requests in flight, by the key o."""

    AGE = "age"
    PHASE = "phase"


@dataclass(frozen=True, slots=True)
class Quit:
    """End the command."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Take an engine out of service; a new incarnation replaces it."""

    engine_id: str

    def __str__(self) -> str:
        return f"drain {self.engine_id}, which a new incarnation replaces"


@dataclass(frozen=True, slots=True)
class SetRole:
    """Let an engine serve in another role."""

    engine_id: str
    role: EngineRole

    def __str__(self) -> str:
        return f"let {self.engine_id} serve as {self.role.value}"


_OrderT = TypeVar("_OrderT", Order, RequestOrder)
Action: TypeAlias = Quit | Drain | SetRole


class TopState:
    """The contents of the screen. update() takes statuses, and press() takes keys."""

    def __init__(self) -> None:
        self.status = admin_pb2.GetStatusResponse()
        self.live = LiveCluster()
        self.finished: Sequence[RequestStory] = ()
        """The last requests that have ended, the newest first."""
        self.why_none_finished = ""
        self.bottleneck: Bottleneck = find_bottleneck(self.live)
        self.mode = Mode.TABLE
        self.order = Order.NAME
        self.request_order = RequestOrder.AGE
        self.filter = ""
        self.message = ""
        self.is_paused = False
        self.error = ""
        self.pending: Drain | SetRole | None = None
        self.selected = ""
        """The id of the selected engine; "" if there is none."""
        self._rates = LiveRates()
        self._histories: dict[str, deque[float]] = {}

    def update(self, status: admin_pb2.GetStatusResponse, now_s: float) -> None:
        """Take a newer status; while paused, only the rates follow it. now_s: when it came, on any monotonic clock"""
        live = self._rates.update(totals_in(status, now_s))
        self.error = ""
        if self.is_paused:
            return
        self.status, self.live = status, live
        self.bottleneck = find_bottleneck(live)
        self._histories = {engine.engine_id: self._history(engine) for engine in live.engines}
        self._keep_selection_shown()

    def take_finished(self, stories: Sequence[RequestStory], problem: str = "") -> None:
        """Take the last requests that have ended, in any order. problem: why there are none; "" if nothing is wrong"""
        if not self.is_paused:
            self.finished = sorted(stories, key=lambda one: -(one.arrived_at_ns / 1e9 + one.duration_s))
            self.why_none_finished = problem

    def fail(self, error: str) -> None:
        """Note why no status came; the last one stays."""
        self.error = error

    def history(self, engine_id: str) -> Sequence[float]:
        """Return an engine's tokens per second, those of prompts and of output together, oldest first."""
        return tuple(self._histories.get(engine_id, ()))

    def engines(self) -> list[LiveEngine]:
        """Return the engines that the filter lets through, in the chosen order."""
        found = [one for one in self.live.engines if self._matches(one.engine_id, one.role, one.state, one.node)]
        match self.order:
            case Order.NAME:
                return sorted(found, key=lambda one: (one.role != "prefill", one.engine_id, one.incarnation))
            case Order.WAITING:
                return sorted(found, key=lambda one: (-one.num_waiting - one.num_held, one.engine_id))
            case Order.KV:
                return sorted(found, key=lambda one: (-one.kv_used, one.engine_id))
            case Order.TOKENS:
                return sorted(found, key=lambda one: (-tokens_per_s(one), one.engine_id))

    def requests(self) -> list[admin_pb2.RequestInFlight]:
        """Return the requests in flight that the filter lets through, in the chosen order."""
        found = [
            one
            for one in self.status.requests
            if self._matches(one.request_id, one.tenant, one.phase, one.prefill_engine, one.decode_engine)
        ]
        if self.request_order is RequestOrder.PHASE:
            return sorted(found, key=lambda one: (one.phase, -one.age_seconds))
        return sorted(found, key=lambda one: -one.age_seconds)

    def finished_shown(self) -> list[RequestStory]:
        """Return the ended requests that the filter lets through, the newest first."""
        return [one for one in self.finished if self._matches(one.request_id, one.tenant, *one.engine_ids)]

    def press(self, key: str) -> Action | None:
        """Take a key, as top_keys names it; returns what is to be done now, if anything is."""
        if key == "interrupt":
            return Quit()
        match self.mode:
            case Mode.TABLE:
                return self._press_in_table(key)
            case Mode.HELP:
                self.mode = Mode.TABLE
            case Mode.FILTER:
                self._press_in_filter(key)
            case Mode.ROLE:
                self._press_role(key)
            case Mode.CONFIRM:
                return self._press_confirm(key)
        return None

    def _press_in_table(self, key: str) -> Action | None:
        self.message = ""
        match key:
            case "q":
                return Quit()
            case "escape":
                self.filter = ""
                self._keep_selection_shown()
            case "?" | "h":
                self.mode = Mode.HELP
            case "/":
                self.mode = Mode.FILTER
            case "s":
                self.order = _next(Order, self.order)
            case "o":
                self.request_order = _next(RequestOrder, self.request_order)
            case "p" | " ":
                self.is_paused = not self.is_paused
            case "up" | "k":
                self._select(-1)
            case "down" | "j":
                self._select(1)
            case "d" if self.selected:
                self._ask(Drain(self.selected))
            case "r" if self.selected:
                self.mode = Mode.ROLE
            case _:
                pass
        return None

    def _press_in_filter(self, key: str) -> None:
        if key == "enter":
            self.mode = Mode.TABLE
        elif key == "escape":
            self.mode, self.filter = Mode.TABLE, ""
        elif key == "backspace":
            self.filter = self.filter[:-1]
        elif len(key) == 1 and len(self.filter) < _MAX_FILTER:
            self.filter += key
        self._keep_selection_shown()

    def _press_role(self, key: str) -> None:
        role = ROLE_KEYS.get(key)
        if role is None:
            self.mode, self.message = Mode.TABLE, "nothing was changed"
        else:
            self._ask(SetRole(self.selected, role))

    def _press_confirm(self, key: str) -> Action | None:
        action, self.pending, self.mode = self.pending, None, Mode.TABLE
        if key != "y":
            self.message = "nothing was changed"
            return None
        return action

    def _ask(self, action: Drain | SetRole) -> None:
        self.pending, self.mode = action, Mode.CONFIRM

    def _select(self, step: int) -> None:
        shown = [engine.engine_id for engine in self.engines()]
        if shown:
            at = shown.index(self.selected) + step if self.selected in shown else 0
            self.selected = shown[min(max(at, 0), len(shown) - 1)]

    def _keep_selection_shown(self) -> None:
        """Select the first engine if the selected one is not shown, so that no key acts on what nobody sees."""
        shown = [engine.engine_id for engine in self.engines()]
        if self.selected not in shown:
            self.selected = shown[0] if shown else ""

    def _matches(self, *texts: str) -> bool:
        asked = self.filter.lower()
        return not asked or any(asked in text.lower() for text in texts)

    def _history(self, engine: LiveEngine) -> deque[float]:
        history = self._histories.get(engine.engine_id) or deque(maxlen=HISTORY)
        history.append(tokens_per_s(engine))
        return history


def tokens_per_s(engine: LiveEngine) -> float:
    """Return the tokens per second that an engine computes, of prompts and of output together."""
    return (engine.prompt_tokens_per_s or 0.0) + (engine.output_tokens_per_s or 0.0)


def _next(kind: type[_OrderT], now: _OrderT) -> _OrderT:
    values = list(kind)
    return values[(values.index(now) + 1) % len(values)]
