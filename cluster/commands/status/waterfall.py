"""The waterfall of a request in the terminal: each phase as a bar on one time axis, engine by engine."""

from __future__ import annotations

from typing import Final

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from cluster.observability.stories.find_cause import in_words
from cluster.observability.stories.request_story import Phase, PhaseSpan, RequestStory

_NAMES: Final = {
    Phase.TRANSFER_HIDDEN: "hidden transfer",
    Phase.TRANSFER_EXPOSED: "exposed transfer",
    Phase.BATCH: "wait for batch",
    Phase.UNREPORTED: "not reported",
}
"""Names of phases that are not called by their values."""
_BARS: Final = {
    Phase.ADMISSION: ("▒", "white"),
    Phase.QUEUE: ("░", "yellow"),
    Phase.RESERVATION: ("░", "yellow"),
    Phase.PREFILL: ("█", "blue"),
    Phase.TRANSFER_HIDDEN: ("▒", "cyan"),
    Phase.TRANSFER_EXPOSED: ("░", "red"),
    Phase.BATCH: ("░", "yellow"),
    Phase.DECODE: ("█", "green"),
    Phase.PREEMPTED: ("░", "magenta"),
    Phase.RECOVERY: ("░", "red"),
    Phase.UNREPORTED: ("·", "white"),
}
"""Full bars are work, light ones are waits, so that the waterfall can be read without colours."""
_MIN_BAR: Final = 12
_MAX_BAR: Final = 100
_MAX_ENGINE_CHARS: Final = 20
_INGRESS: Final = "ingress"


class Waterfall:
    """The phases of a story. On a screen that is too narrow for bars, the beginnings of the phases stand there."""

    def __init__(self, story: RequestStory) -> None:
        self._story = story

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        del console
        spans = self._story.spans
        if not spans:
            return
        engine_width = min(_MAX_ENGINE_CHARS, max(len(span.engine_id or _INGRESS) for span in spans))
        phase_width = max(len(_name(span.phase)) for span in spans)
        durations = [in_words(span.seconds(self._story.duration_s)) for span in spans]
        duration_width = max(map(len, durations))
        bar_width = min(_MAX_BAR, options.max_width - engine_width - phase_width - duration_width - 3)
        if bar_width >= _MIN_BAR:
            yield _axis(self._story.duration_s, engine_width + phase_width + 2, bar_width)
        for index, (span, duration) in enumerate(zip(spans, durations, strict=True)):
            if span.attempt > 1 and (index == 0 or spans[index - 1].attempt < span.attempt):
                yield Text(f"attempt {span.attempt}", style="bold", no_wrap=True, overflow="ellipsis")
            engine = (span.engine_id or _INGRESS)[:engine_width]
            line = Text(f"{engine:<{engine_width}} {_name(span.phase):<{phase_width}} ", no_wrap=True)
            if bar_width >= _MIN_BAR:
                line.append_text(self._bar(span, bar_width))
                line.append(f" {duration:>{duration_width}}")
            else:
                line.append(f"{duration:>{duration_width}} at {in_words(span.began_s)}")
            line.truncate(options.max_width, overflow="ellipsis")
            yield line

    def _bar(self, span: PhaseSpan, width: int) -> Text:
        """Return the span's row of the diagram: at least one character, however short the phase was."""
        total_s = self._story.duration_s or 1.0
        first = min(width - 1, int(span.began_s / total_s * width))
        last = int((span.began_s + span.seconds(self._story.duration_s)) / total_s * width)
        length = max(1, min(width, last) - first)
        character, colour = _BARS[span.phase]
        bar = Text(" " * first)
        bar.append(character * length, style=colour)
        bar.append(" " * (width - first - length))
        return bar


def _axis(duration_s: float, indent: int, width: int) -> Text:
    """Return the line with the times above the bars: 0, the middle, the end."""
    middle, end = in_words(duration_s / 2), in_words(duration_s)
    line = list(f"{'0':<{width}}")
    for text, at in ((middle, width // 2), (end, width - len(end))):
        if all(character == " " for character in line[at - 1 : at + len(text)]) and at + len(text) <= width:
            line[at : at + len(text)] = text
    return Text(" " * indent + "".join(line), style="dim", no_wrap=True)


def _name(phase: Phase) -> str:
    return _NAMES.get(phase, phase.value)
