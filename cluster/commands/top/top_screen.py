"""Draws the state of `raypd top`: sections share the height of the screen, and count the rows that do not fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cluster.api.protos.raypd.v1 import admin_pb2
from cluster.commands.status.wide_table import age
from cluster.commands.top.bars import PHASE_STYLES, filled_bar, phase_bar, sparkline
from cluster.commands.top.request_bars import bar_phases
from cluster.commands.top.top_state import ROLE_KEYS, Mode, TopState
from cluster.observability.live.bottleneck import BottleneckKind, gb_per_s
from cluster.observability.live.live_rates import LiveEngine, LiveLink
from cluster.observability.stories.find_cause import in_words
from cluster.observability.stories.request_story import RequestStory

_BAR_WIDTH: Final = 10
_MAX_ID: Final = 24
_PHASES_WIDTH: Final = 24
_NARROW_PHASES_WIDTH: Final = 12
_NARROW: Final = 100
"""Below this width the bars of phases are narrow."""
_GOOD_ENDS: Final = ("stop", "length")
_GAP: Final = 2
"""The blanks between two columns."""
_MIN_LAST_WIDTH: Final = 8
_WANTED_LAST_WIDTH: Final = 20
"""Columns are left out until the last one, a text, has this width."""
_SECTION_LINES: Final = 2
"""The lines of a section beside its rows: its title and the names of its columns."""
_KEYS: Final = (
    ("up, down, j, k", "select an engine"),
    ("s", "sort the engines by name, waiting requests, KV or tokens per second"),
    ("o", "order the requests in flight by age or by phase"),
    ("/", "show only engines and requests whose names have a text; Enter keeps it, Esc clears it"),
    ("d", "drain the selected engine; a new incarnation replaces it (asks first)"),
    ("r", "let the selected engine serve in another role (asks first)"),
    ("p, space", "pause, and go on"),
    ("?, h", "this help"),
    ("q, Ctrl-C", "quit"),
)


@dataclass(frozen=True, slots=True)
class _Section:
    """A table of the screen.

    columns: a leading blank stands for text on the left
    rows:    their cells
    spare:   the columns that are left out on narrow screens, the first one first
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | Text]]
    spare: Sequence[str] = ()


def render(state: TopState, width: int, height: int) -> RenderableType:
    """Return the screen. width, height: in characters and lines"""
    if state.mode is Mode.HELP:
        return _help()
    head, foot = _head(state), _foot(state)
    sections = [one for one in _sections(state, width) if one.rows]
    room = height - len(head) - len(foot) - _SECTION_LINES * len(sections)
    shares = share_rows([len(section.rows) for section in sections], room)
    parts: list[RenderableType] = [*head]
    parts += [_table(section, share, width) for section, share in zip(sections, shares, strict=True) if share]
    return Group(*parts, *foot)


def share_rows(wanted: Sequence[int], room: int) -> list[int]:
    """Divide lines among sections: none gets more than it wants, and no other one has more where it has less."""
    shares = [0] * len(wanted)
    while room > 0 and shares != list(wanted):
        for at, share in enumerate(shares):
            if share < wanted[at] and room > 0:
                shares[at] += 1
                room -= 1
    return shares


def _head(state: TopState) -> list[Text]:
    status = state.status
    first = Text.assemble(
        ("raypd top", "bold"),
        f"  model {status.model}  {len(status.requests)} in flight  ",
        f"{_rate(_sum(state, 'prompt_tokens_per_s'))} prompt tok/s  ",
        f"{_rate(_sum(state, 'output_tokens_per_s'))} output tok/s",
        ("  paused" if state.is_paused else "", "bold yellow"),
    )
    calm = state.bottleneck.kind is BottleneckKind.NOTHING
    lines = [first, Text(state.bottleneck.text, "green" if calm else "bold yellow")]
    if state.why_none_finished:
        lines.append(Text(f"no finished requests: {state.why_none_finished}", "yellow"))
    if state.error:
        lines.append(Text(f"no newer status: {state.error}", "red"))
    if status.controller_error:
        lines.append(Text(f"the controller does not answer: {status.controller_error}", "red"))
    if status.update:
        lines.append(Text(f"update: {status.update}", "yellow"))
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
    return lines


def _foot(state: TopState) -> list[Text]:
    match state.mode:
        case Mode.FILTER:
            line = Text(f"show only: {state.filter}_   Enter keeps it, Esc clears it", "bold")
        case Mode.ROLE:
            keys = ", ".join(f"{key} {role.value}" for key, role in ROLE_KEYS.items())
            line = Text(f"role of {state.selected}: {keys}; any other key changes nothing", "bold yellow")
        case Mode.CONFIRM:
            line = Text(f"{state.pending}? y for yes, any other key for no", "bold yellow")
        case _:
            shown = f"only {state.filter!r}  " if state.filter else ""
            orders = f"sorted by {state.order.value}, requests by {state.request_order.value}"
            line = Text(state.message or f"{shown}{orders}   ? help  / filter  s sort  d drain  r role  q quit", "dim")
    line.no_wrap, line.overflow = True, "ellipsis"
    return [line]


def _help() -> RenderableType:
    table = Table(title="keys of raypd top", title_justify="left", title_style="bold", box=None, show_header=False)
    for keys, meaning in _KEYS:
        table.add_row(keys, meaning)
    colours = Text("phases: ")
    for name, (character, style) in PHASE_STYLES.items():
        colours.append(f"{character * 3} {name}  ", style)
    return Group(table, "", colours, "", "any key goes back")


def _sections(state: TopState, width: int) -> list[_Section]:
    return [
        _engines(state, width),
        _links(state.live.links),
        _finished(state.finished_shown(), _PHASES_WIDTH if width >= _NARROW else _NARROW_PHASES_WIDTH),
        _requests(state.requests()),
        _decisions(state.status.decisions),
    ]


def _engines(state: TopState, width: int) -> _Section:
    columns = [" ", " engine", " role", " state", "run", "wait", "for KV", "held", " KV", "step"]
    columns += ["prompt/s", "output/s", " tokens/s"]
    line_width = max(8, width - 96)
    rows = [_engine_row(state, engine, line_width) for engine in state.engines()]
    return _Section("engines", columns, rows, (" tokens/s", "held", "for KV", "step", "prompt/s", "output/s"))


def _engine_row(state: TopState, engine: LiveEngine, line_width: int) -> list[str | Text]:
    mark = Text(">" if engine.engine_id == state.selected else " ", "bold")
    head: list[str | Text] = [mark, _short(engine.engine_id), engine.role, _state(engine)]
    if not engine.has_stats:
        return [*head, *["-"] * 8, ""]
    return [
        *head,
        str(engine.num_running),
        _count(engine.num_waiting),
        str(engine.num_waiting_for_kv),
        str(engine.num_held),
        filled_bar(engine.kv_used, _BAR_WIDTH),
        "-" if engine.step_s is None else f"{engine.step_s * 1000:.1f} ms",
        _rate(engine.prompt_tokens_per_s),
        _rate(engine.output_tokens_per_s),
        Text(sparkline(state.history(engine.engine_id), line_width), "cyan"),
    ]


def _state(engine: LiveEngine) -> Text:
    return Text(engine.state, "default" if engine.state in ("ready", "connected") else "yellow")


def _links(links: Sequence[LiveLink]) -> _Section:
    ordered = sorted(links, key=lambda link: -(link.bytes_per_s or 0.0))
    rows: list[list[str | Text]] = [
        [
            f"{_short(link.producer_id)} -> {_short(link.consumer_id)}",
            Text(link.state, "default" if link.state == "open" else "red"),
            str(link.num_active_transfers),
            "-" if link.bytes_per_s is None else gb_per_s(link.bytes_per_s),
            Text(link.last_error, "red"),
        ]
        for link in ordered
    ]
    return _Section("links", (" from -> to", " state", "transfers", "rate", " last error"), rows)


def _requests(requests: Sequence[admin_pb2.RequestInFlight]) -> _Section:
    rows: list[list[str | Text]] = [
        [
            _short(f"{one.tenant}/{one.request_id}" if one.tenant else one.request_id),
            age(one.age_seconds),
            Text(one.phase, PHASE_STYLES.get(one.phase, ("", "default"))[1]),
            _short(one.prefill_engine) or "-",
            _short(one.decode_engine) or "-",
            str(one.prompt_tokens),
            str(one.output_tokens),
            str(one.attempt),
        ]
        for one in requests
    ]
    columns = (" request", "age", " phase", " prefill", " decode", "prompt", "output", "attempt")
    return _Section("requests in flight", columns, rows, ("attempt", "prompt", " prefill", " decode"))


def _finished(stories: Sequence[RequestStory], phases_width: int) -> _Section:
    rows: list[list[str | Text]] = [
        [
            _short(f"{one.tenant}/{one.request_id}" if one.tenant else one.request_id),
            Text(one.outcome or "", "default" if one.outcome in _GOOD_ENDS else "red"),
            "-" if one.ttft_s is None else in_words(one.ttft_s),
            in_words(one.duration_s),
            str(one.num_output_tokens),
            phase_bar(bar_phases(one), phases_width),
            one.cause,
        ]
        for one in stories
    ]
    columns = (" request", " end", "first token", "all", "output", " phases", " why it took so long")
    return _Section("last finished requests", columns, rows, ("output", "first token", " end"))


def _decisions(decisions: Sequence[admin_pb2.Decision]) -> _Section:
    rows = [[age(one.age_seconds), one.text] for one in reversed(decisions)]
    return _Section("the controller's decisions", ("ago", " what and why"), rows)


def _table(section: _Section, num_rows: int, width: int) -> RenderableType:
    """Return a section's first rows; its title counts those that are left out. The last column is cut off at width."""
    total = len(section.rows)
    title = section.title if num_rows >= total else f"{section.title}, {num_rows} of {total}"
    table = Table(box=None, pad_edge=False)
    columns, rows = _fitting(section, section.rows[:num_rows], width)
    for at, name in enumerate(columns):
        table.add_column(
            name.strip(),
            justify="left" if name.startswith(" ") else "right",
            no_wrap=True,
            overflow="ellipsis",
            # rich would take the same from all columns, so that a long cause left nothing of the short ones.
            max_width=_width_left(columns, rows, width) if at == len(columns) - 1 else None,
        )
    for row in rows:
        # Not as markup: ids of requests are what clients chose.
        table.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in row))
    # A title of the table's own would wrap where the table is narrow.
    return Group(Text(title, "bold", no_wrap=True, overflow="ellipsis"), table)


def _fitting(
    section: _Section, rows: Sequence[Sequence[str | Text]], width: int
) -> tuple[list[str], list[list[str | Text]]]:
    """Return the columns for which there is room, and these of the rows: a column that is there is legible."""
    columns, kept = list(section.columns), [list(row) for row in rows]
    for name in section.spare:
        *others, last = _widths(columns, kept)
        if sum(others) + min(last, _WANTED_LAST_WIDTH) + _GAP * len(others) <= width:
            break
        at = columns.index(name)
        del columns[at]
        for row in kept:
            del row[at]
    return columns, kept


def _width_left(columns: Sequence[str], rows: Sequence[Sequence[str | Text]], width: int) -> int:
    """Return the width that the last column may have beside the whole width of all others."""
    return max(_MIN_LAST_WIDTH, width - sum(_widths(columns, rows)[:-1]) - _GAP * (len(columns) - 1))


def _widths(columns: Sequence[str], rows: Sequence[Sequence[str | Text]]) -> list[int]:
    """Return the width of each column without its gap."""
    return [max(cell_len(name.strip()), *(_cell_width(row[at]) for row in rows)) for at, name in enumerate(columns)]


def _cell_width(cell: str | Text) -> int:
    return cell.cell_len if isinstance(cell, Text) else cell_len(cell)


def _short(name: str) -> str:
    return name if len(name) <= _MAX_ID else f"{name[: _MAX_ID - 1]}…"


def _count(number: int) -> Text:
    return Text(str(number), "bold yellow" if number else "default")


def _rate(per_s: float | None) -> str:
    if per_s is None:
        return "-"
    return f"{per_s:,.0f}" if per_s >= 10 or per_s == 0 else f"{per_s:.1f}"


def _sum(state: TopState, name: str) -> float | None:
    rates: list[float | None] = [getattr(engine, name) for engine in state.live.engines]
    known = [rate for rate in rates if rate is not None]
    return sum(known) if known else None
