import random

import pytest

from tests.tools.demo_corpus.programs_that_run import assert_that_it_holds
from tools.demo_corpus.number_functions import NUMBER_FUNCTIONS, select_numbers


@pytest.mark.parametrize("seed", range(60))
def test_functions_do_what_their_checks_say(seed: int) -> None:
    rng = random.Random(seed)
    for write in NUMBER_FUNCTIONS:
        assert_that_it_holds(write(rng))


def test_the_check_is_of_the_function_that_was_written() -> None:
    lesson = select_numbers(random.Random(1))
    name = lesson.code.removeprefix("def ").split("(")[0]
    assert lesson.checks[0].startswith(f"{name}([3, -4, 0, 7, 10, -1]) == ")
