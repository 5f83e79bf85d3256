"""docs/models.md says of every model type what happens if one tries to serve it."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.model.config.text_parts import SERVED_AS_TEXT
from tests.models import children
from tests.models.children import try_all
from tests.models.table import PAGE, render, render_figures, row_of, rows_on_page
from tests.models.tiny_configs import MODEL_TYPES
from tests.models.trial import ABILITIES, Outcome, try_model_type

pytestmark = pytest.mark.usefixtures("shared_models")

SAMPLE = ("gpt_oss", "falcon", "mamba", "deepseek_v32", "bart", "roberta")
TEXT_PARTS = [pytest.param(name, marks=[] if name == "llama4" else pytest.mark.more) for name in SERVED_AS_TEXT]


@pytest.mark.parametrize("model_type", [*SAMPLE, *TEXT_PARTS])
def test_the_page_says_the_truth_about_a_sample(model_type: str, tmp_path: Path) -> None:
    assert row_of(try_model_type(model_type, tmp_path)) == rows_on_page()[model_type]


def test_the_page_has_a_row_for_every_model_type() -> None:
    assert sorted(rows_on_page()) == list(MODEL_TYPES)


def test_the_page_ends_with_the_sizes_of_published_models() -> None:
    assert PAGE.read_text(encoding="utf-8").endswith(render_figures()), "run `make models`"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_page_says_the_truth_about_all() -> None:
    assert PAGE.read_text(encoding="utf-8").endswith(render(try_all(MODEL_TYPES))), "run `make models`"


def test_a_trial_that_hangs_or_dies_is_a_fault_and_the_next_one_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    script = """
import sys, time
for name in sys.argv[1:]:
    if name == "dies":
        sys.exit(3)
    if name == "hangs":
        time.sleep(600)
    print('noise\\noutcome of a trial: {"model_type": "%s", "abilities": [], "reason": "r"}' % name, flush=True)
"""
    monkeypatch.setattr(children, "COMMAND", (children.COMMAND[0], "-c", script))
    monkeypatch.setattr(children, "NUM_CHILDREN", 1)

    def outcomes(*names: str, limit_s: float) -> dict[str, str]:
        found = try_all(names, limit_s)
        return {name: outcome.fault or outcome.reason for name, outcome in found.items()}

    died = {"one": "r", "dies": "its process ended with status 3", "two": "r"}
    assert outcomes("one", "dies", "two", limit_s=60.0) == died
    # On a busy machine a process may take longer to start than the time in which one has hung.
    for limit_s in (1.0, 5.0, 30.0):
        hung = outcomes("hangs", "three", limit_s=limit_s)
        assert hung["hangs"] == f"no outcome within {limit_s:.0f} s"
        if hung["three"] != hung["hangs"]:
            break
    assert hung["three"] == "r"


def test_what_is_missing_stands_in_a_row_and_a_fault_is_no_row() -> None:
    assert row_of(Outcome("a", ABILITIES)) == "| a | served | all |\n"
    without = tuple(name for name in ABILITIES if name != "two ranks")
    assert row_of(Outcome("a", without)) == "| a | served | all but two ranks |\n"
    assert row_of(Outcome("b", reason="it uses ALiBi")) == "| b | refused | it uses ALiBi |\n"
    with pytest.raises(AssertionError, match="c: wrong tokens"):
        row_of(Outcome("c", ABILITIES, fault="wrong tokens"))
