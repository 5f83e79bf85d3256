"""The report of tests/gpu: its figures, their arithmetic and its two forms. Needs no GPU."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The sizes that decide what a decode step reads.

    weight_bytes: of all weights that a step reads, the embeddings of other tokens left out
    kv_token_bytes: keys and values of one token, in all layers
    """

    weight_bytes: int
    kv_token_bytes: int

    def step_bytes(self, batch: int, context: int) -> int:
        """Return what a decode step has to read from the device's memory."""
        return self.weight_bytes + batch * context * self.kv_token_bytes


@dataclass(frozen=True, slots=True)
class DecodeFigure:
    """Seconds of a decode step: `batch` requests with `context` tokens each. graph_s is None if none was captured."""

    batch: int
    context: int
    step_bytes: int
    eager_s: float
    graph_s: float | None

    @property
    def bytes_per_s(self) -> float:
        """The rate at which the faster of the two reads."""
        return self.step_bytes / min(self.eager_s, self.graph_s or self.eager_s)


@dataclass(slots=True)
class Report:
    """The results of one machine.

    machine: versions and names
    skipped: the reason why nothing, or a part, was run
    broken: for each part that ended with an error, the error
    correctness: outcome of each test by name
    copy_bytes_per_s: read and written bytes of a copy within the device, each counted
    links: bytes per second of an NCCL link's ways of moving a chunk, and of a plain copy
    """

    machine: Mapping[str, str] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    correctness: Mapping[str, str] = field(default_factory=dict)
    copy_bytes_per_s: float | None = None
    decode: Sequence[DecodeFigure] = ()
    links: Mapping[str, float] = field(default_factory=dict)

    @property
    def failures(self) -> list[str]:
        """The tests that failed, and the parts that ended with an error."""
        tests = [name for name, outcome in self.correctness.items() if outcome not in ("passed", "skipped")]
        return tests + self.broken

    def to_json(self) -> str:
        """Return everything, with the rates that follow from it."""
        content = asdict(self) | {"failures": self.failures}
        for figure, entry in zip(self.decode, content["decode"], strict=True):
            entry["bytes_per_s"] = figure.bytes_per_s
            entry["share_of_copy"] = self.share_of_copy(figure)
        return json.dumps(content, indent=2)

    def share_of_copy(self, figure: DecodeFigure) -> float | None:
        """Return a decode step's rate as a part of a copy's; 1 is what the memory allows."""
        return None if not self.copy_bytes_per_s else figure.bytes_per_s / self.copy_bytes_per_s

    def to_markdown(self) -> str:
        """Return tables for people."""
        lines = ["# raypd on a GPU", ""]
        lines += [f"- {name}: {value}" for name, value in self.machine.items()]
        lines += [f"- not run: {reason}" for reason in self.skipped]
        if self.correctness:
            counts = {outcome: list(self.correctness.values()).count(outcome) for outcome in ("passed", "skipped")}
            lines += ["", f"{counts['passed']} tests passed, {counts['skipped']} were skipped."]
        lines += [f"- FAILED: {name}" for name in self.failures]
        if self.copy_bytes_per_s:
            lines += ["", f"A copy within the device moves {_gb(self.copy_bytes_per_s)} GB/s, read and written."]
        if self.decode:
            lines += ["", "| batch | context | eager ms | graph ms | GB/s | of a copy |", "|---|---|---|---|---|---|"]
            lines += [self._row(figure) for figure in self.decode]
        if self.links:
            lines += ["", "| way of moving a chunk | GB/s |", "|---|---|"]
            lines += [f"| {name} | {_gb(rate)} |" for name, rate in self.links.items()]
        return "\n".join(lines) + "\n"

    def _row(self, figure: DecodeFigure) -> str:
        graph = "-" if figure.graph_s is None else f"{figure.graph_s * 1e3:.2f}"
        share = self.share_of_copy(figure)
        cells = [
            str(figure.batch),
            str(figure.context),
            f"{figure.eager_s * 1e3:.2f}",
            graph,
            _gb(figure.bytes_per_s),
            "-" if share is None else f"{share:.0%}",
        ]
        return f"| {' | '.join(cells)} |"


def write_report(report: Report, path: Path) -> None:
    """Write the report in the form that the file's name asks for: .json, or .md."""
    if path.suffix not in (".json", ".md"):
        raise ValueError(f"{path}: the report is written as .json or .md")
    path.write_text(report.to_json() if path.suffix == ".json" else report.to_markdown())


def read_outcomes(junit: Path) -> dict[str, str]:
    """Return each test's outcome from the file that pytest's --junit-xml writes."""
    from xml.etree import ElementTree

    outcomes: dict[str, str] = {}
    for case in ElementTree.parse(junit).getroot().iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        outcomes[f"{case.get('classname')}.{case.get('name')}"] = outcome
    return outcomes


def _gb(rate: float) -> str:
    return f"{rate / 1e9:.1f}"
