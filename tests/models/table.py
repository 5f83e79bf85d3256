"""The table of model types at the end of docs/models.md."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from cluster.commands.doctor.kv_figures import kv_figures
from tests.models.geometries import GEOMETRIES
from tests.models.trial import ABILITIES, Outcome

PAGE: Final = Path(__file__).parents[2] / "docs" / "models.md"
MARK: Final = "<!-- Everything below is written by `make models`. -->\n"

_ALL: Final = "all"
_FIGURES: Final = "\n## Sizes of the KV cache\n"
_BLOCK_SIZE: Final = 16
_DECODE_RANKS: Final = 8


def row_of(outcome: Outcome) -> str:
    """Return a model type's row. Raises AssertionError if it is neither served right nor refused."""
    assert not outcome.fault, f"{outcome.model_type}: {outcome.fault}"
    if not outcome.abilities:
        return f"| {outcome.model_type} | refused | {outcome.reason.replace('|', '/')} |\n"
    missing = [name for name in ABILITIES if name not in outcome.abilities]
    return f"| {outcome.model_type} | served | {_ALL}{' but ' if missing else ''}{', '.join(missing)} |\n"


def render(outcomes: Mapping[str, Outcome]) -> str:
    """Return what stands below the mark."""
    rows = [row_of(outcomes[name]) for name in sorted(outcomes)]
    num_served = sum(bool(outcome.abilities) for outcome in outcomes.values())
    return (
        f"\n{num_served} of {len(rows)} model types are served with the small configs of tests/models. `{_ALL}` stands "
        f"for: {', '.join(ABILITIES)}.\n\n"
        "| model type | | with, or why not |\n|---|---|---|\n" + "".join(rows) + render_figures()
    )


def render_figures() -> str:
    """Return the section on the sizes of published models' KV caches, which ends the page."""
    rows = []
    for name, config in GEOMETRIES.items():
        figures = kv_figures(config, dtype_bytes=2, block_size=_BLOCK_SIZE)
        moved = [figures.transfer_bytes_per_token(size) for size in (1, _DECODE_RANKS)]
        numbers = [figures.bytes_per_token, figures.state_bytes, figures.blocks_per_gib(), *moved]
        rows.append(f"| {name} | {' | '.join(f'{number:,}' for number in numbers)} |\n")
    return (
        f"{_FIGURES}\nIn bfloat16, with blocks of {_BLOCK_SIZE} tokens. `raypd doctor` prints these figures for any "
        "checkpoint. Layers with a window keep all\ntokens. Latent attention keeps one vector of a token in a layer, "
        f"and all ranks of a decode engine get it: the last column is for\n{_DECODE_RANKS} ranks.\n\n"
        "| model | KV bytes per token | state bytes per request | blocks per GiB | handoff bytes per token | "
        f"to {_DECODE_RANKS} ranks |\n|---|---|---|---|---|---|\n" + "".join(rows)
    )


def rows_on_page() -> dict[str, str]:
    """Return the rows of the page by model type."""
    _, _, table = PAGE.read_text(encoding="utf-8").partition(MARK)
    table = table.partition(_FIGURES)[0]
    rows = [line + "\n" for line in table.splitlines() if line.startswith("| ")]
    return {row.split(" | ")[0].removeprefix("| "): row for row in rows[1:]}


def write(outcomes: Mapping[str, Outcome]) -> None:
    """Write the table into the page."""
    head, mark, _ = PAGE.read_text(encoding="utf-8").partition(MARK)
    assert mark, f"{PAGE.name} has lost the line {MARK.strip()!r}"
    PAGE.write_text(head + mark + render(outcomes), encoding="utf-8")
