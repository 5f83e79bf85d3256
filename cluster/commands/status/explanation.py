"""`raypd explain`: where the time of a request went, why it went to its engines, and what came true."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.text import Text

from cluster.api.protos.raypd.v1 import generate_pb2
from cluster.client import GenerateClient
from cluster.commands.status.waterfall import Waterfall
from cluster.commands.status.wide_table import WideTable
from cluster.errors import InvalidConfig
from cluster.observability.stories.chrome_trace import chrome_trace
from cluster.observability.stories.find_cause import in_words
from cluster.observability.stories.make_story import make_story
from cluster.observability.stories.request_story import EventKind, RequestStory
from cluster.routing.decision import Decision, Reason, RoleChoice, RouteTerms
from cluster.routing.request_record import AttemptRecord, EngineTimes, RequestRecord, comparisons

_WHY: Final = {
    Reason.COST: "it costs least",
    Reason.TIE_DRAWN: "several placements cost the same within the error of the prediction, and this one was drawn",
    Reason.ONLY_WAY: "no other placement was possible",
    Reason.MODEL_NOT_SURE: "an engine cannot predict its steps yet, so the rule of the mode disaggregate decided",
    Reason.MODE: "the routing mode leaves no choice of the way",
    Reason.REROUTED: "the prompt still waited when this engine ran out of prompts, and to go there costs less",
    Reason.OWN_RULE: "requests of this kind are routed by a rule of their own",
}
_TERMS: Final = (
    ("prefill_wait_s", "wait for prefill"),
    ("decode_wait_s", "wait at decode"),
    ("prefill_s", "prefill"),
    ("decode_s", "decode"),
    ("inflicted_s", "inflicted on others"),
    ("transfer_s", "exposed transfer"),
    ("blocks_wait_s", "wait for blocks"),
    ("fetch_s", "fetch of a prefix"),
    ("adapter_s", "load of the adapter"),
    ("miss_penalty_s", "penalty for missed aims"),
    ("total_s", "total"),
)
_CLIENTS: Final = (("ttft_s", "time to first token"), ("itl_s", "time between tokens"))


@dataclass(frozen=True, slots=True)
class Asked:
    """The question that `raypd explain` answers.

    request_id: one request, by its id or the beginning of it, which may end with "…" as raypd top cuts ids; "" for the
                last ones
    last:       the number of the last requests
    tenant:     whose requests; None: see the API
    perfetto:   write the requests to this file, for Perfetto, instead of printing them
    """

    request_id: str = ""
    last: int = 0
    tenant: str | None = None
    as_json: bool = False
    perfetto: Path | None = None


async def show_explanation(address: str, console: Console, asked: Asked, *, timeout_s: float) -> None:
    """Print what is known of a request, or of the last ones. Raises ClusterError."""
    async with GenerateClient(address) as client:
        request_id = asked.request_id.removesuffix("…")
        last = 0 if asked.request_id else asked.last
        found = await client.explain(request_id, last=last, tenant=asked.tenant, timeout_s=timeout_s)
    records, unreadable = _read(found.records)
    stories = [make_story(record) for record in records]
    if asked.perfetto is not None:
        _write(asked.perfetto, stories)
        console.print(Text(f"{len(stories)} requests in {asked.perfetto}: open it at https://ui.perfetto.dev"))
        for problem in (*unreadable, *_missing(found)):
            console.print(problem)
    elif asked.as_json:
        answer = {
            "records": [json.loads(record) for record in found.records],
            "stories": [json.loads(story.to_json()) for story in stories],
            "unanswered": [{"ingress": one.ingress, "reason": one.reason} for one in found.unanswered],
            "left_out": found.left_out,
        }
        console.print_json(data=answer)
    elif asked.request_id:
        console.print(render_explanation(found))
    else:
        console.print(Group(render_last(stories), *unreadable, *_missing(found)))


def render_last(stories: Sequence[RequestStory]) -> RenderableType:
    """Return a table of requests, the newest one last, with the cause of each one's time."""
    if not stories:
        return "no requests yet"
    columns = (" request", "age", "took", "first token", "tokens", " outcome", " what took so long")
    now_s = time.time()
    rows = [
        [
            story.request_id,
            f"{max(0.0, now_s - story.arrived_at_ns / 1e9):.0f} s",
            in_words(story.duration_s),
            _seconds(story.ttft_s),
            story.num_output_tokens,
            story.outcome or "in flight",
            story.cause,
        ]
        for story in stories
    ]
    return WideTable("last requests", columns, rows)


def _read(texts: Sequence[str]) -> tuple[list[RequestRecord], list[Text]]:
    """Return the records, and what is wrong with those of another version of raypd."""
    records, problems = [], []
    for text in texts:
        try:
            records.append(RequestRecord.from_json(text))
        except ValueError as error:
            problems.append(Text(f"{error}; --json prints it as it is"))
    return records, problems


def _write(path: Path, stories: Sequence[RequestStory]) -> None:
    try:
        path.write_bytes(chrome_trace(stories))
    except OSError as error:
        raise InvalidConfig(f"--perfetto {path}", [f"cannot be written: {error.strerror or error}"]) from error


def _missing(found: generate_pb2.ExplainResponse) -> Iterator[Text]:
    if found.left_out:
        yield Text(f"{found.left_out} further records do not fit into an answer: ask for a sample by its own id")
    for one in found.unanswered:
        yield Text(f"{one.ingress} did not answer, and may have further records: {one.reason}")


def render_explanation(found: generate_pb2.ExplainResponse) -> RenderableType:
    """Return the records as text and tables, and which ingresses may have further ones."""
    records, unreadable = _read(found.records)
    parts: list[RenderableType] = [*unreadable]
    for record in records:
        parts += [*render_record(record), ""]
    return Group(*parts, *_missing(found))


def render_record(record: RequestRecord) -> Iterator[RenderableType]:
    """Yield the lines and tables of one record."""
    tenant = f" of tenant {record.tenant}" if record.tenant else ""
    arrived = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(record.arrived_at_s))
    yield Text(f"request {record.request_id}{tenant}", style="bold")
    yield Text(f"at {record.ingress} since {arrived} UTC, model version {record.model_version}")
    end = "in flight" if record.outcome is None else f"ended after {_seconds(record.duration_s)}: {record.outcome}"
    yield Text(f"{record.num_prompt_tokens} prompt tokens, {record.num_output_tokens} output tokens, {end}")
    times = f"first token after {_seconds(record.ttft_s)}; between tokens {_seconds(record.itl_p50_s)} (median), "
    yield Text(f"{times}{_seconds(record.itl_max_s)} (longest)")
    story = make_story(record)
    yield Text(f"what took so long: {story.cause}\n", style="bold")
    yield Waterfall(story)
    for event in story.events:
        if event.kind is not EventKind.FIRST_TOKEN:
            yield Text(f"after {in_words(event.at_s)}: {event.text}")
    for number, attempt in enumerate(record.attempts):
        skipped = record.num_attempts_left_out if number else 0
        yield from _attempt(record, attempt, number + skipped + 1)
        if not number and record.num_attempts_left_out:
            yield Text(f"\n{record.num_attempts_left_out} attempts are left out here")


def _attempt(record: RequestRecord, attempt: AttemptRecord, number: int) -> Iterator[RenderableType]:
    engines = [attempt.prefill_engine_id, *attempt.decode_engine_ids]
    route = " -> ".join(engine for engine in engines if engine is not None)
    yield Text(f"\nattempt {number}, {_seconds(attempt.began_s)} after the arrival: {route}", style="bold")
    if attempt.failure:
        yield Text(f"failed after {attempt.num_new_tokens} output tokens: {attempt.failure}")
    if attempt.decision is None:
        yield Text("no decision was recorded: a fixed rule chose these engines")
    else:
        yield from _decision(attempt.decision)
    compared = [
        [
            one.what,
            _seconds(one.predicted_s),
            _seconds(one.measured_s),
            "-" if one.error is None else f"{one.error:+.0%}",
        ]
        for one in comparisons(record, attempt)
    ]
    if compared:
        yield WideTable("what came true", (" ", "predicted", "measured", "off by"), compared)
    yield from _reports(attempt)


def _decision(decision: Decision) -> Iterator[RenderableType]:
    why = f"mode {decision.mode.value}: {_WHY[decision.reason]}"
    chosen, second = decision.chosen, decision.runner_up
    if chosen is None:
        yield Text(f"{why}; nothing was predicted")
        return
    if second is not None:
        more_s = second.total_s - chosen.total_s
        compared = f"{_seconds(abs(more_s))} {'more' if more_s >= 0 else 'less'}"
        why += f"; the runner-up, {_name(second)}, costs {compared}"
    yield Text(why)
    placements = {"chosen": chosen} | ({} if second is None else {"runner-up": second})
    for other in decision.others:
        if other != second:
            placements[f"best {other.way.value}"] = other
    if decision.roles is not None and decision.roles.offered_per_s:
        yield Text(_role_use(decision.roles))
    rows: list[list[object]] = [["way", *(one.way.value for one in placements.values())]]
    rows.append(["engines", *(_route(one) for one in placements.values())])
    rows.append(["cached tokens", *(one.num_cached_tokens for one in placements.values())])
    for name, title in (*_TERMS, *_CLIENTS):
        values = [float(getattr(one, name)) for one in placements.values()]
        if any(values) or name == "total_s":
            rows.append([title, *map(_seconds, values)])
    rows.append(["misses an aim by", *(_risk(one) for one in placements.values())])
    yield WideTable("predicted cost", (" ", *placements), rows)
    if decision.without_roles_s > 0:
        ratio = f"{chosen.total_s / decision.without_roles_s:.2f} times"
        yield Text(
            f"chosen: {ratio} the cost of the best placement without roles, {_seconds(decision.without_roles_s)}"
        )


def _role_use(roles: RoleChoice) -> str:
    return (
        f"roles are {roles.use.value}: {roles.offered_per_s:.1f} requests/s come; with roles kept "
        f"{roles.kept_per_s:.1f} would meet their aims, and {roles.ignored_per_s:.1f} without roles"
    )


def _reports(attempt: AttemptRecord) -> Iterator[RenderableType]:
    """Yield what the engines reported, if any did."""
    engines = ((attempt.prefill_engine_id, attempt.prefill), (attempt.decode_engine_ids[-1], attempt.decode))
    reports = [(engine_id, times) for engine_id, times in engines if engine_id is not None and times is not None]
    if not reports:
        return
    cells: tuple[tuple[str, Callable[[EngineTimes], object]], ...] = (
        ("queued", lambda one: _seconds(one.queued_s)),
        ("prefill", lambda one: _seconds(one.prefill_s)),
        ("computed", lambda one: one.num_prompt_tokens_computed),
        ("cached", lambda one: one.num_cached_tokens),
        ("preempted", lambda one: one.num_preemptions),
        ("received", lambda one: f"{one.num_transferred_bytes / 2**20:.1f} MiB"),
        ("transfer", lambda one: _seconds(one.transfer_s)),
        ("exposed", lambda one: _seconds(one.exposed_transfer_s)),
    )
    rows = [[engine_id, *(cell(times) for _, cell in cells)] for engine_id, times in reports]
    yield WideTable("what the engines reported", (" engine", *(name for name, _ in cells)), rows)


def _name(terms: RouteTerms) -> str:
    return f"{terms.way.value} on {_route(terms)}"


def _route(terms: RouteTerms) -> str:
    return " -> ".join(one for one in (terms.prefill_engine_id, terms.decode_engine_id) if one is not None)


def _risk(terms: RouteTerms) -> str:
    return f"{terms.ttft_miss_probability:.0%} TTFT, {terms.itl_miss_probability:.0%} ITL"


def _seconds(value: float | None) -> str:
    return "-" if value is None else in_words(value)
