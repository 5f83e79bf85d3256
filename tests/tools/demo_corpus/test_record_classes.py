import random

import pytest

from tests.tools.demo_corpus.programs_that_run import assert_that_it_holds
from tools.demo_corpus.record_classes import RECORD_CLASSES, record_class


@pytest.mark.parametrize("seed", range(40))
def test_classes_do_what_their_checks_say(seed: int) -> None:
    rng = random.Random(seed)
    for write in RECORD_CLASSES:
        assert_that_it_holds(write(rng))


def test_a_record_is_a_dataclass_or_has_a_constructor() -> None:
    codes = [record_class(random.Random(seed)).code for seed in range(30)]
    assert {code.startswith("@dataclass\n") for code in codes} == {True, False}
    assert all(("def __init__" in code) != code.startswith("@dataclass\n") for code in codes)
