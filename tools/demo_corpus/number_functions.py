"""Exercises about lists of numbers, units and areas, put together from conditions and what is done with them."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from tools.demo_corpus.exercise import Lesson

_NUMBERS = [3, -4, 0, 7, 10, -1]
_CONDITIONS = {
    "even": "{x} % 2 == 0",
    "odd": "{x} % 2 != 0",
    "positive": "{x} > 0",
    "negative": "{x} < 0",
    "nonzero": "{x} != 0",
    "small": "{x} < 10",
    "large": "{x} >= 100",
}
_CHANGES = (
    ("double", "double", "{x} * 2"),
    ("square", "square", "{x} ** 2"),
    ("square", "square", "{x} * {x}"),
    ("negate", "negative", "-{x}"),
    ("halve", "half", "{x} / 2"),
    ("triple", "triple", "{x} * 3"),
    ("increment", "successor", "{x} + 1"),
)
_LISTS = ("numbers", "numbers", "values", "items", "nums")
_ELEMENTS = {"numbers": "number", "values": "value", "items": "item", "nums": "num"}
_RESULTS = ("result", "result", "selected", "output")
_FACTORS = (
    ("kilometers", "miles", "0.621371"),
    ("miles", "kilometers", "1.609344"),
    ("inches", "centimeters", "2.54"),
    ("feet", "meters", "0.3048"),
    ("pounds", "kilograms", "0.453592"),
    ("hours", "minutes", "60"),
    ("minutes", "seconds", "60"),
    ("days", "hours", "24"),
    ("meters", "centimeters", "100"),
    ("kilograms", "grams", "1000"),
)
_AREAS = (
    ("rectangle", ("width", "height"), "width * height"),
    ("triangle", ("base", "height"), "base * height / 2"),
    ("square", ("side",), "side * side"),
    ("circle", ("radius",), "math.pi * radius ** 2"),
    ("trapezoid", ("a", "b", "height"), "(a + b) * height / 2"),
    ("parallelogram", ("base", "height"), "base * height"),
)


@dataclass(frozen=True, slots=True)
class _Parts:
    """The pieces of a function about some of the numbers: word names what is true of them, test says it of x."""

    word: str
    test: str
    items: str
    x: str
    result: str


@dataclass(frozen=True, slots=True)
class _Forms:
    """How a function can be written, and what it returns for the numbers that it is checked with."""

    names: tuple[str, ...]
    docs: tuple[str, ...]
    bodies: tuple[str, ...]
    returned: str
    expected: object


def select_numbers(rng: random.Random) -> Lesson:
    """Select, count, add or look for the numbers of which something is true."""
    word, test = rng.choice(list(_CONDITIONS.items()))
    items = rng.choice(_LISTS)
    x = rng.choice((_ELEMENTS[items], _ELEMENTS[items], "x", "n"))
    parts = _Parts(word, test.format(x=x), items, x, rng.choice(_RESULTS))
    chosen = [number for number in _NUMBERS if eval(test.format(x=number))]
    forms = rng.choice((_select, _count, _sum, _any, _all, _first, _remove))(parts, chosen, rng)
    name, doc = rng.choice(forms.names), rng.choice(forms.docs)
    code = _function(f"{name}({items}: list[int]) -> {forms.returned}", doc, rng.choice(forms.bodies))
    return Lesson(code, checks=(f"{name}({_NUMBERS}) == {forms.expected!r}",))


def change_numbers(rng: random.Random) -> Lesson:
    """Do the same with each element of a list."""
    verb, noun, change = rng.choice(_CHANGES)
    items = rng.choice(_LISTS)
    x = rng.choice((_ELEMENTS[items], _ELEMENTS[items], "x", "n"))
    result = rng.choice(_RESULTS)
    changed = change.format(x=x)
    name = rng.choice((f"{verb}_all", f"{verb}_each", f"{verb}_{items}", f"{verb}_list"))
    bodies = (
        f"return [{changed} for {x} in {items}]",
        f"{result} = []\n{_loop(x, items, f'{result}.append({changed})')}\nreturn {result}",
        f"return list(map(lambda {x}: {changed}, {items}))",
    )
    doc = rng.choice((f"Return the {noun} of each number.", f"{verb.capitalize()} all elements of {items}."))
    code = _function(f"{name}({items}: list[float]) -> list[float]", doc, rng.choice(bodies))
    return Lesson(code, checks=(f"{name}([1, 2, 3]) == {[eval(change.format(x=number)) for number in (1, 2, 3)]!r}",))


def convert_unit(rng: random.Random) -> Lesson:
    """Convert one unit to another."""
    source, target, factor = rng.choice(_FACTORS)
    name = rng.choice((f"{source}_to_{target}", f"{source}_to_{target}", f"convert_{source}_to_{target}"))
    doc = rng.choice((f"Convert {source} to {target}.", f"Return how many {target} there are in {source}."))
    body = rng.choice((f"return {source} * {factor}", f"{target} = {source} * {factor}\nreturn {target}"))
    code = _function(f"{name}({source}: float) -> float", doc, body)
    return Lesson(code, checks=(f"{name}(2) == {2 * float(factor)!r}",))


def compute_area(rng: random.Random) -> Lesson:
    """Compute the area of a shape."""
    shape, sides, formula = rng.choice(_AREAS)
    name = rng.choice((f"{shape}_area", f"area_of_{shape}", f"{shape}_area"))
    doc = rng.choice((f"Return the area of a {shape}.", f"Compute the area of a {shape}."))
    body = rng.choice((f"return {formula}", f"area = {formula}\nreturn area"))
    arguments = ", ".join(f"{side}: float" for side in sides)
    return Lesson(_function(f"{name}({arguments}) -> float", doc, body))


def _select(of: _Parts, chosen: list[int], rng: random.Random) -> _Forms:
    word = of.word
    collect = _loop(of.x, of.items, f"if {of.test}:", f"    {of.result}.append({of.x})")
    return _Forms(
        names=(f"{word}_numbers", f"get_{word}", f"filter_{word}", f"find_{word}", f"select_{word}"),
        docs=(f"Return the {word} numbers.", f"Return only the {word} elements of {of.items}."),
        bodies=(
            f"return [{of.x} for {of.x} in {of.items} if {of.test}]",
            f"{of.result} = []\n{collect}\nreturn {of.result}",
            f"return list(filter(lambda {of.x}: {of.test}, {of.items}))",
        ),
        returned="list[int]",
        expected=chosen,
    )


def _remove(of: _Parts, chosen: list[int], rng: random.Random) -> _Forms:
    word = of.word
    collect = _loop(of.x, of.items, f"if {of.test}:", "    continue", f"{of.result}.append({of.x})")
    return _Forms(
        names=(f"remove_{word}", f"without_{word}", f"drop_{word}"),
        docs=(f"Return the numbers that are not {word}.", f"Return {of.items} without the {word} ones."),
        bodies=(
            f"return [{of.x} for {of.x} in {of.items} if not {of.test}]",
            f"{of.result} = []\n{collect}\nreturn {of.result}",
        ),
        returned="list[int]",
        expected=[number for number in _NUMBERS if number not in chosen],
    )


def _count(of: _Parts, chosen: list[int], rng: random.Random) -> _Forms:
    word, count = of.word, rng.choice(("count", "count", "total"))
    return _Forms(
        names=(f"count_{word}", f"num_{word}", f"count_{word}_numbers"),
        docs=(f"Return how many numbers are {word}.", f"Count the {word} numbers."),
        bodies=(
            f"{count} = 0\n{_loop(of.x, of.items, f'if {of.test}:', f'    {count} += 1')}\nreturn {count}",
            f"return sum(1 for {of.x} in {of.items} if {of.test})",
            f"return len([{of.x} for {of.x} in {of.items} if {of.test}])",
        ),
        returned="int",
        expected=len(chosen),
    )


def _sum(of: _Parts, chosen: list[int], rng: random.Random) -> _Forms:
    word, total = of.word, rng.choice(("total", "total", "result"))
    return _Forms(
        names=(f"sum_{word}", f"sum_of_{word}", f"add_{word}", f"sum_{word}_numbers"),
        docs=(f"Return the sum of the {word} numbers.", f"Add up the {word} numbers."),
        bodies=(
            f"{total} = 0\n{_loop(of.x, of.items, f'if {of.test}:', f'    {total} += {of.x}')}\nreturn {total}",
            f"return sum({of.x} for {of.x} in {of.items} if {of.test})",
        ),
        returned="int",
        expected=sum(chosen),
    )


def _any(of: _Parts, chosen: list[int], rng: random.Random) -> _Forms:
    word = of.word
    article = "an" if word[0] in "aeiou" else "a"
    return _Forms(
        names=(f"has_{word}", f"any_{word}", f"contains_{word}"),
        docs=(f"Return True if any number is {word}.", f"Check whether there is {article} {word} number."),
        bodies=(
            f"return any({of.test} for {of.x} in {of.items})",
            f"{_loop(of.x, of.items, f'if {of.test}:', '    return True')}\nreturn False",
        ),
        returned="bool",
        expected=bool(chosen),
    )


def _all(of: _Parts, chosen: list[int], rng: random.Random) -> _Forms:
    word = of.word
    return _Forms(
        names=(f"all_{word}", f"are_all_{word}", f"only_{word}"),
        docs=(f"Return True if all numbers are {word}.", f"Check whether every number is {word}."),
        bodies=(
            f"return all({of.test} for {of.x} in {of.items})",
            f"{_loop(of.x, of.items, f'if not ({of.test}):', '    return False')}\nreturn True",
        ),
        returned="bool",
        expected=chosen == _NUMBERS,
    )


def _first(of: _Parts, chosen: list[int], rng: random.Random) -> _Forms:
    word = of.word
    return _Forms(
        names=(f"first_{word}", f"find_first_{word}", f"find_{word}_number"),
        docs=(f"Return the first {word} number, or None.", f"Find the first number that is {word}."),
        bodies=(
            f"{_loop(of.x, of.items, f'if {of.test}:', f'    return {of.x}')}\nreturn None",
            f"return next(({of.x} for {of.x} in {of.items} if {of.test}), None)",
        ),
        returned="int | None",
        expected=chosen[0] if chosen else None,
    )


def _loop(x: str, items: str, *body: str) -> str:
    return "\n".join([f"for {x} in {items}:", *(f"    {line}" for line in body)])


def _function(signature: str, docstring: str, body: str) -> str:
    indented = "\n".join(f"    {line}" for line in body.splitlines())
    return f'def {signature}:\n    """{docstring}"""\n{indented}\n'


NUMBER_FUNCTIONS: tuple[Callable[[random.Random], Lesson], ...] = (
    select_numbers,
    select_numbers,
    change_numbers,
    convert_unit,
    compute_area,
)
