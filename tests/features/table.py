"""docs/features.md as the outcomes of the scenarios make it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tests.features.feature import Scenario

PAGE: Final = Path(__file__).parents[2] / "docs" / "features.md"

_HEAD: Final = """# Every kind of request, wherever it is served

Written by `make features`, which asks for each of them and compares every answer; `make test` does the same and fails
if this page says something else. Float32 on the CPU. Greedy output is compared with transformers' own; what is sampled,
with the same request where nothing happens to it, and that with transformers' logits in the tests of the sampler.

- **P only**: a cluster of one prefill engine. **D only**: of one decode engine. **handed over**: prefill on one engine,
  decode on another.
- **preempted**: handed over, then preempted up to three times with all that the engine had cached forgotten. Prompts of
  which a vector is wanted are preempted on the prefill engine, which alone computes them.
- **resumed after a crash**: the engine that a request is on dies in the middle of the output, and another goes on.
- **with overlap**: handed over, while both engines schedule a step before the last one has ended.

"""
_MARKS: Final = {True: "✓", False: "✗", None: "-"}
"""None: there is no such thing."""


def render(outcomes: Mapping[str, Mapping[Scenario, bool]]) -> str:
    """The page. outcomes: by feature and scenario, whether the answer was right; what cannot be asked for is absent."""
    rows = [("feature", *Scenario), ("---", *(":-:" for _ in Scenario))]
    rows += [
        (feature, *(_MARKS[by_scenario.get(scenario)] for scenario in Scenario))
        for feature, by_scenario in outcomes.items()
    ]
    return _HEAD + "".join(f"| {' | '.join(row)} |\n" for row in rows)
