import random

import pytest

from tests.tools.demo_corpus.programs_that_run import assert_that_it_holds
from tools.demo_corpus.exercise import Lesson, parse_exercises, read_exercises

_STACK = """\
=== items: elements; push: put
use stack = Stack()
use stack.push(1)
check stack.pop() == 1
---
class Stack:
    \"""@{A stack.|A pile of $items.}\"""

    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop()
    #?
    def clear(self):
        self.items.clear()
"""


def spellings(text: str, count: int = 40) -> set[Lesson]:
    [exercise] = parse_exercises(text)
    return {exercise.spell(random.Random(seed)) for seed in range(count)}


def test_names_change_in_code_text_and_checks_alike() -> None:
    lessons = spellings(_STACK)
    [renamed, *_] = [lesson for lesson in lessons if "self.elements" in lesson.code and "def put(" in lesson.code]
    assert "items" not in renamed.code
    assert renamed.uses == ("stack = Stack()", "stack.put(1)")
    assert {"A stack.", "A pile of elements."} == {
        lesson.code.split('"""')[1] for lesson in lessons if "self.elements" in lesson.code
    }


def test_an_optional_method_is_there_or_not() -> None:
    endings = {lesson.code.endswith(".clear()\n") for lesson in spellings(_STACK)}
    assert endings == {True, False}
    assert all("#?" not in lesson.code for lesson in spellings(_STACK))


def test_a_choice_within_a_choice_is_made_as_well() -> None:
    lessons = spellings("=== f: g\n---\ndef f():\n    @{return @<1|2>|x = 3\\n    return x}\n")
    bodies = {lesson.code.split(":\n", 1)[1] for lesson in lessons}
    assert bodies == {"    return 1\n", "    return 2\n", "    x = 3\n    return x\n"}


def test_a_name_that_the_code_has_already_is_not_taken() -> None:
    lessons = spellings("=== a: b\n---\ndef f(a):\n    b = a\n    return b\n")
    assert {lesson.code for lesson in lessons} == {"def f(a):\n    b = a\n    return b\n"}


def test_a_member_of_os_keeps_its_name() -> None:
    lessons = spellings("=== path: filename\n---\ndef f(path):\n    return os.path.exists(path)\n")
    assert {lesson.code.split("return ")[1] for lesson in lessons} == {
        "os.path.exists(path)\n",
        "os.path.exists(filename)\n",
    }


@pytest.mark.parametrize("topic", ["containers", "files", "lists", "numbers", "strings", "things"])
def test_every_exercise_does_what_its_checks_say(topic: str) -> None:
    for exercise in read_exercises()[topic]:
        for seed in range(4):
            assert_that_it_holds(exercise.spell(random.Random(seed)))
