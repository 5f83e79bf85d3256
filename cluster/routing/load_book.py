"""Keeps, for each engine, the work that it has: its newest report, and what this ingress has sent there since.

An engine reports twice a second over its session, whether the controller lives or not. A report says how many of this
ingress's requests it counts; the later ones are added here, with the work that was predicted when they were sent. A
request that has left the engine since the report is deducted again. What an ingress sends, and what has left, it
announces to the engine, which tells all other ingresses at once. So each ingress sees its own work at once, and that of
the others after the way of two messages: otherwise all would send to the engine that was idle when it reported.

An engine that computes prompts half of the time delays those that decode there. So the book measures which part of its
time each engine spends on prompts. An engine of role `prefill` is taken to spend its share of all engines' prompt work,
whoever does that work now: without that, prompts and decodes that are once mixed on all engines would stay mixed,
because no single request gains by being the first that goes elsewhere.

Between reports an engine works: the queue of prompts is kept as the time at which it will be empty, which a request
that is sent there moves on. So a report that is late does not make an engine look busy for ever.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Final, Protocol
from weakref import ref

from actors.core.outputs.scheduler_stats import LoadReport
from actors.core.outputs.sent_work import SentWork
from cluster.routing.costs.recent_load import RecentLoad, RecentRates
from cluster.routing.costs.step_prediction import StepFamily
from cluster.routing.engine_connection import EngineDescriptor, EngineKey, EngineRole
from cluster.routing.reported_work import (
    DEFAULT_BATCHED_TOKENS,
    DEFAULT_BLOCK_SIZE,
    MAX_PROMPT_SHARE,
    CountedWork,
    EngineWork,
    Link,
    ReportingEngine,
    queue_seconds,
)

_CHUNK: Final = 512
"""Tokens of a usual chunk of a prompt, at whose cost computed tokens are reckoned."""
_DEDUCTED: Final = (
    "num_decodes",
    "num_coming_decodes",
    "num_context_tokens",
    "num_late",
    "num_sent_late",
    "num_free_blocks",
    "queue_end_s",
)
"""The numbers of an EngineWork in which a request under way counts."""
_MEMORY_S: Final = 10.0
"""The time over which the part of an engine's time that goes to prompts is averaged."""


class Watcher(Protocol):
    """Follows the engines' work."""

    def update(self, work: EngineWork) -> None:
        """Take in that an engine's work has changed."""


class LoadBook:
    """The work of all engines of one ingress. Belongs to its event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Know nothing yet. clock: seconds"""
        self.clock = clock
        self._works: dict[EngineKey, EngineWork] = {}
        self._families: dict[Hashable, _Family] = {}
        self._family_of: dict[EngineKey, _Family] = {}
        # A router that nobody uses any more, as its model version has left, is not kept for this.
        self._watchers: list[ref[Watcher]] = []

    def watch(self, watcher: Watcher) -> None:
        """Tell the watcher whenever the work of an engine has changed. The book does not keep the watcher alive."""
        self._watchers = [*(known for known in self._watchers if known() is not None), ref(watcher)]

    def work_of(self, engine: EngineDescriptor) -> EngineWork:
        """Return the work of an engine, which changes as reports come; of an unknown one, that of an idle engine."""
        work = self._works.get(engine.key)
        if work is None:
            work = self._works[engine.key] = EngineWork(engine.key)
            family = self._families.setdefault((engine.model_version, engine.pairing), _Family())
            self._family_of[engine.key] = family
            work.prediction = family.steps.prediction(engine.key)
        return work

    def keep(self, engines: Collection[EngineKey]) -> None:
        """Forget engines that are not among these."""
        for key in self._works.keys() - set(engines):
            del self._works[key]
            self._family_of.pop(key).forget(key)
        used = set(map(id, self._family_of.values()))
        self._families = {kind: family for kind, family in self._families.items() if id(family) in used}

    def age_s(self, engine: EngineKey) -> float:
        """Return the seconds since an engine's newest report; infinity if there is none."""
        work = self._works.get(engine)
        return float("inf") if work is None else self.clock() - work.reported_at_s

    def num_blocks_sent(self, engine: EngineKey) -> int:
        """Return the blocks that the requests take which an engine's newest report does not count."""
        work = self._works.get(engine)
        return 0 if work is None else sum(map(work.blocks_of, work.sent_since()))

    def offered(self, engines: Iterable[EngineKey]) -> RecentRates:
        """Return the load of the last seconds of all engines that are of one kind with one of these."""
        families = {id(family): family for family in map(self._family_of.__getitem__, engines)}
        now_s = self.clock()
        return sum((family.offered.rates(now_s) for family in families.values()), RecentRates())

    def note_report(self, session: ReportingEngine) -> None:
        """Take in the newest report of a session, unless it is known."""
        report, work = session.load_report, self.work_of(session.descriptor)
        if session is not work.session:
            # The engine counts the requests of each session from zero; those of an earlier session are gone.
            if work.session is not None:
                work.sent.clear()
                work.num_sent_late = 0.0
                work.announced.clear()
            work.session, work.report = session, LoadReport()
        is_new = session.step_costs is not work.step_costs and session.step_costs != work.step_costs
        if is_new or work.prediction is None:
            work.step_costs = session.step_costs
            family = self._family_of[work.key]
            family.steps.put(work.key, session.step_costs)
            work.prediction = family.steps.prediction(work.key)
        if report is not None and report.number > work.report.number:
            self._take_share(work, session)
            self._take(work, report)
        self._tell(work)

    def note_sent(self, engine: EngineDescriptor, request_id: str, sent: SentWork) -> None:
        """Add a request's work to an engine that the request was just submitted to, and announce it there."""
        work = self.work_of(engine)
        ordinal = 0
        if work.session is not None:
            ordinal = work.session.num_submitted_requests
            work.session.announce(sent)
        work.sent[request_id] = CountedWork(ordinal, sent)
        work.num_sent_late += sent.late_part
        self._family_of[work.key].offered.note(sent, self.clock())
        self._add_sent(work, sent)
        self._tell(work)

    def note_announced(
        self, session: ReportingEngine, num_submitted: int, works: Sequence[SentWork], left: Sequence[SentWork] = ()
    ) -> None:
        """Add the work of requests that another ingress has submitted to an engine, and deduct that of others.

        num_submitted: a report counts `works` if its num_taken_from_all is at least this
        left:          of requests that the engine has no more
        """
        work = self.work_of(session.descriptor)
        if session is not work.session:
            return
        for sent in works:
            self._family_of[work.key].offered.note(sent, self.clock())
        for sent in works if num_submitted > work.report.num_taken_from_all else ():
            work.announced.append(CountedWork(num_submitted, sent))
            self._add_sent(work, sent)
        for sent in left:
            # Which of two requests with equal work has left makes no difference.
            new = next((one for one in work.announced if one.work == sent), None)
            if new is not None:
                work.announced.remove(new)
            self._deduct(work, sent, is_reported=new is None)
        self._tell(work)

    def starts_in_s(self, engine: EngineKey, request_id: str) -> float:
        """Return the time until an engine starts with a prompt, if that was the last one sent; 0 if it is unknown."""
        work = self._works.get(engine)
        entry = None if work is None else work.sent.get(request_id)
        return 0.0 if work is None or entry is None else work.wait_s(self.clock()) - entry.work.prefill_s

    @contextmanager
    def without(self, engines: Iterable[EngineKey], request_id: str) -> Iterator[None]:
        """Leave a request whose prompt waits out of the work of its engines, as long as the context lasts.

        An engine whose session was opened again does not have the request any more.
        """
        known = (self._works.get(engine) for engine in engines)
        works = [(work, work.sent[request_id]) for work in known if work is not None and request_id in work.sent]
        before = [copy(work) for work, _ in works]
        for work, entry in works:
            work.queue_end_s -= entry.work.prefill_s
            work.num_sent_late -= entry.work.late_part
            self._deduct(work, entry.work, is_reported=entry.ordinal <= work.report.num_taken_requests)
        try:
            yield
        finally:
            for (work, _), whole in zip(works, before, strict=True):
                for name in _DEDUCTED:
                    setattr(work, name, getattr(whole, name))

    def note_left(self, engine: EngineKey, request_id: str, *, is_waiting: bool = False) -> None:
        """Deduct a request that has ended, was aborted, or has failed at an engine. Unknown ones are ignored.

        is_waiting: whether its prompt was still in the queue
        """
        work = self._works.get(engine)
        entry = None if work is None else work.sent.pop(request_id, None)
        if work is None or entry is None:
            return
        if work.session is not None and entry.work.num_context_tokens:
            work.session.announce_left(entry.work)
        work.num_sent_late = max(work.num_sent_late - entry.work.late_part, 0.0) if work.sent else 0.0
        if is_waiting:
            work.queue_end_s -= entry.work.prefill_s
        self._deduct(work, entry.work, is_reported=entry.ordinal <= work.report.num_taken_requests)
        self._tell(work)

    @staticmethod
    def _deduct(work: EngineWork, sent: SentWork, *, is_reported: bool) -> None:
        if sent.num_context_tokens:
            # It is not known whether this one was late.
            work.num_late *= 1 - 1 / max(work.num_decodes, 1)
            work.num_decodes = max(work.num_decodes - 1, 0)
            work.num_coming_decodes = min(work.num_coming_decodes, work.num_decodes)
            work.num_context_tokens = max(work.num_context_tokens - sent.num_context_tokens, 0)
        if not is_reported:
            work.num_free_blocks += work.blocks_of(sent)

    def _add_sent(self, work: EngineWork, sent: SentWork) -> None:
        work.queue_end_s = max(work.queue_end_s, self.clock()) + sent.prefill_s
        _sum_in(work, sent)

    def _take_share(self, work: EngineWork, session: ReportingEngine) -> None:
        """Measure the part of its time that an engine has spent on prompts since its last report."""
        elapsed_s = self.clock() - work.reported_at_s
        num_tokens = session.num_prompt_tokens_computed - work.num_prompt_tokens_computed
        work.num_prompt_tokens_computed = session.num_prompt_tokens_computed
        family, share = self._family_of[work.key], 0.0
        if work.prediction is not None and 0 < elapsed_s < math.inf and num_tokens > 0:
            # Requests that decode get a token in steps with prompts, too: only what the prompts add is lost to them.
            num_decodes = max(work.report.num_decodes, 1)
            num_context = work.report.num_decode_context_tokens or _CHUNK
            limits = _CHUNK + num_decodes
            share = work.prediction.prefill_steps(num_tokens, 0, num_decodes, num_context, limits).added_s / elapsed_s
        family.note_role(work.key, session.descriptor.role)
        family.note_share(work.key, share, min(elapsed_s / _MEMORY_S, 1.0))
        work.prompt_share = min(family.share(work.key), MAX_PROMPT_SHARE)
        work.own_prompt_share = min(family.own_share(work.key), MAX_PROMPT_SHARE)

    def _take(self, work: EngineWork, report: LoadReport) -> None:
        work.report, work.reported_at_s = report, self.clock()
        work.announced = [one for one in work.announced if one.ordinal > report.num_taken_from_all]
        work.num_blocks = report.num_blocks
        work.block_size = report.block_size or DEFAULT_BLOCK_SIZE
        work.num_state_blocks = report.num_state_blocks
        work.kv_bytes_per_token = report.kv_bytes_per_token
        work.max_num_batched_tokens = report.max_num_batched_tokens or DEFAULT_BATCHED_TOKENS
        work.max_num_seqs = report.max_num_seqs
        work.mixed_step_bound_s, work.late_after_s = report.mixed_step_bound_s, report.late_after_s
        work.in_time_part = report.num_decodes_in_time / report.num_decodes if report.num_decodes else 1.0
        work.decode_gap_s = report.decode_gap_s
        work.num_gaps_of_each = report.num_decode_gaps / report.num_decodes if report.num_decodes else 0.0
        work.links, work.reported_links = {}, {link.peer: link for link in report.links}
        work.most_bytes_per_s = max((link.bytes_per_s for link in report.links), default=0.0)
        self._sum_up(work)
        num_tokens = report.num_waiting_tokens + report.num_prefill_tokens
        sent_s = sum(sent.prefill_s for sent in work.sent_since())
        # What was sent since the moment that the report describes begins after what was there, and not before now.
        rest_s = max(queue_seconds(work, num_tokens) + report.describes_in_s, 0.0)
        work.queue_end_s = work.reported_at_s + rest_s + sent_s

    def _sum_up(self, work: EngineWork) -> None:
        """Add to the report what was sent since."""
        report = work.report
        num_waiting = report.num_waiting_tokens / work.block_size + report.num_waiting_slots * report.num_state_blocks
        work.num_free_blocks = report.num_free_blocks - num_waiting
        # Those whose prompts are not computed yet will decode beside a request that is sent there now.
        work.num_coming_decodes = float(report.num_coming_decodes)
        work.num_decodes = report.num_decodes + report.num_coming_decodes
        work.num_late = float(report.num_decodes - report.num_decodes_in_time + report.num_coming_late)
        work.num_context_tokens = report.num_decode_context_tokens + report.num_coming_context_tokens
        work.num_queued_bytes = float(sum(link.num_queued_bytes for link in report.links))
        for sent in work.sent_since():
            _sum_in(work, sent)

    def _tell(self, work: EngineWork) -> None:
        for known in self._watchers:
            if (watcher := known()) is not None:
                watcher.update(work)


class _Family:
    """Engines that run the same model with equal settings, and how much of their time goes to prompts."""

    def __init__(self) -> None:
        self.steps = StepFamily()
        self.offered = RecentLoad()
        self._is_prefill: dict[EngineKey, bool] = {}
        self._num_prefill = 0
        self._shares: dict[EngineKey, float] = {}
        self._sum = 0.0

    def note_role(self, key: EngineKey, role: EngineRole) -> None:
        """Take in an engine's role."""
        is_prefill = role is EngineRole.PREFILL
        self._num_prefill += is_prefill - self._is_prefill.get(key, False)
        self._is_prefill[key] = is_prefill

    def note_share(self, key: EngineKey, share: float, weight: float) -> None:
        """Take a measured part of time into an engine's average. weight: how much it counts, 0 to 1"""
        before = self._shares.get(key, 0.0)
        self._shares[key] = before + weight * (share - before)
        self._sum += self._shares[key] - before

    def share(self, key: EngineKey) -> float:
        """Return the part of its time that an engine is taken to spend on prompts."""
        own = self.own_share(key)
        if not self._is_prefill.get(key, False):
            return own
        return max(own, self._sum / self._num_prefill)

    def own_share(self, key: EngineKey) -> float:
        """Return the part of its time that an engine has spent on prompts of late."""
        return self._shares.get(key, 0.0)

    def forget(self, key: EngineKey) -> None:
        """Forget an engine that has left."""
        self.steps.put(key, None)
        self._num_prefill -= self._is_prefill.pop(key, False)
        self._sum -= self._shares.pop(key, 0.0)


def _sum_in(work: EngineWork, sent: SentWork) -> None:
    if sent.num_context_tokens:
        work.num_decodes += 1
        work.num_coming_decodes += 1
        work.num_context_tokens += sent.num_context_tokens
        work.num_late += sent.late_part
    work.num_free_blocks -= work.blocks_of(sent)
    if sent.consumer is not None and sent.num_handoff_bytes:
        link = work.link_to(sent.consumer)
        work.num_queued_bytes += sent.num_handoff_bytes
        queued = link.num_queued_bytes + sent.num_handoff_bytes
        work.links[sent.consumer] = Link(queued, link.bytes_per_s, link.round_trip_s)
