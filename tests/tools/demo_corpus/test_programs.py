from itertools import islice

from tests.tools.demo_corpus.programs_that_run import run
from tools.demo_corpus.programs import imports_of, write_programs


def test_programs_run_with_their_examples_and_tests() -> None:
    for program in islice(write_programs(seed=3), 150):
        names = run(program, "__main__")
        for name, test in names.items():
            if name.startswith("test_") and callable(test):
                test()


def test_a_seed_gives_the_same_programs_and_another_one_others() -> None:
    first, again, other = (list(islice(write_programs(seed), 20)) for seed in (3, 3, 4))
    assert first == again
    assert first != other


def test_programs_differ() -> None:
    assert len(set(islice(write_programs(seed=5), 200))) > 190


def test_a_program_imports_what_it_uses_and_nothing_that_it_defines() -> None:
    code = "class Counter:\n    pass\n\n\ndef f(time):\n    return math.pi, deque(), Counter(), time\n"
    assert imports_of(code) == "import math\nfrom collections import deque"
