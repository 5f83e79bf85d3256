"""Every feature in every scenario, and the table that says so."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Callable, Iterator

import pytest

from tests.features.feature import CheckpointOf, Group, Scenario, Setup
from tests.features.groups import GROUPS
from tests.features.scenarios import run_scenario
from tests.features.table import PAGE, render
from tests.structured import compiling_in_process
from tests.vision import processing_in_process

Outcomes = dict[str, dict[Scenario, bool]]

_WRITE = "RAYPD_WRITE_FEATURES"


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    """The outcomes that the tests of this module have seen so far."""
    return {feature: {} for group in GROUPS for feature in group.features}


@pytest.fixture(scope="module")
def prepared(checkpoint: CheckpointOf) -> Callable[[Group], Setup]:
    """Prepare what a group asks for, and the answers that it expects, which are the same in every scenario."""
    return functools.cache(lambda group: group.prepare(checkpoint))


@pytest.fixture(autouse=True)
def work_in_process() -> Iterator[None]:
    with compiling_in_process(), processing_in_process():
        yield


@pytest.mark.parametrize("scenario", Scenario, ids=lambda scenario: scenario.value)
@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.name)
def test_each_answer_is_right(
    group: Group, scenario: Scenario, prepared: Callable[[Group], Setup], outcomes: Outcomes
) -> None:
    setup = prepared(group)
    assert tuple(feature.name for feature in setup.features) == group.features
    for feature in setup.features:
        if scenario in feature.scenarios:
            outcomes[feature.name][scenario] = False
    seen = asyncio.run(run_scenario(scenario, setup))
    for feature_name, error in seen.items():
        outcomes[feature_name][scenario] = error is None
    errors = [error for error in seen.values() if error is not None]
    if errors:
        raise BaseExceptionGroup(", ".join(name for name, error in seen.items() if error is not None), errors)


def test_the_table_says_what_was_seen(request: pytest.FixtureRequest, outcomes: Outcomes) -> None:
    cases = [item for item in request.session.items if item.path == request.path]
    if len(cases) <= len(GROUPS) * len(Scenario):
        pytest.skip("only some of the scenarios were run")
    page = render(outcomes)
    if os.environ.get(_WRITE):
        PAGE.write_text(page, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == page, f"{PAGE.name} is not what was seen: run `make features`"
