"""Programs of the demo model's corpus: a few lessons in one style, with what they import and how they are used."""

import ast
import random
import re
from collections.abc import Iterator

from tools.demo_corpus.exercise import Exercise, Lesson, read_exercises
from tools.demo_corpus.number_functions import NUMBER_FUNCTIONS
from tools.demo_corpus.record_classes import RECORD_CLASSES
from tools.demo_corpus.spelling import Style, respell

_MEMBERS = {
    "collections": ("Counter", "OrderedDict", "defaultdict", "deque"),
    "collections.abc": ("Callable", "Iterator"),
    "dataclasses": ("dataclass",),
    "datetime": ("date",),
    "functools": ("lru_cache", "wraps"),
    "pathlib": ("Path",),
}
_MODULES = ("argparse", "csv", "heapq", "json", "math", "os", "random", "re", "string", "sys", "time")
_TITLES = ("Exercises", "Examples", "Small programs", "Some functions", "Practice", "Solutions")
_FAMILY_PROBABILITY = 0.2
# How often each file of exercises is drawn from, relative to the others.
_WEIGHTS = {"containers": 3, "files": 2, "lists": 4, "numbers": 4, "strings": 3, "things": 2}


def write_programs(seed: int) -> Iterator[str]:
    """Yield programs without end, the same ones for the same seed."""
    rng = random.Random(seed)
    exercises = read_exercises()
    while True:
        yield write_program(rng, exercises)


def write_program(rng: random.Random, exercises: dict[str, list[Exercise]]) -> str:
    """Return a program of one to four lessons."""
    style = Style.draw(rng)
    lessons = []
    names: set[str] = set()
    topic = rng.choices(list(exercises), [_WEIGHTS[name] for name in exercises])[0]
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4))):
        if rng.random() < _FAMILY_PROBABILITY:
            lesson = rng.choice([*NUMBER_FUNCTIONS, *RECORD_CLASSES])(rng)
        else:
            lesson = rng.choice(exercises[topic]).spell(rng)
        defined = defined_names(lesson.code)
        if names.isdisjoint(defined):
            names |= defined
            lessons.append(lesson)
    parts = [respell(_with_examples(lesson, rng), style).strip("\n") for lesson in lessons]
    usage = _usage(lessons, rng)
    text = "\n\n\n".join([*parts, usage] if usage else parts)
    imports = imports_of(text)
    head = f'"""{rng.choice(_TITLES)}."""\n\n' if rng.random() < 0.1 else ""
    return head + (imports + "\n\n\n" if imports else "\n" if head else "") + text + "\n"


def defined_names(code: str) -> set[str]:
    """Return the names that a piece of code defines at its top level."""
    return {node.name for node in ast.parse(code).body if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def imports_of(code: str) -> str:
    """Return the import statements that a program needs: modules first."""
    tree = ast.parse(code)
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - defined_names(code)
    stored = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    parameters = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    modules = [f"import {name}" for name in _MODULES if name in used - stored - parameters]
    members = []
    for module, names in _MEMBERS.items():
        if imported := [name for name in names if name in used - stored]:
            members.append(f"from {module} import {', '.join(imported)}")
    return "\n".join([*modules, *members])


def _with_examples(lesson: Lesson, rng: random.Random) -> str:
    """Put the checks into the docstring of the first function, sometimes."""
    examples = [pair for check in lesson.checks if not lesson.uses and (pair := _call_and_result(check))]
    if not examples or rng.random() > 0.2:
        return lesson.code
    text = "".join(f"    >>> {call}\n    {result!r}\n" for call, result in examples)
    return re.sub(r'(    """[^"\n]*)"""\n', lambda match: f'{match[1]}\n\n{text}    """\n', lesson.code, count=1)


def _call_and_result(check: str) -> tuple[str, object] | None:
    """Split a check into a call and what it returns; None if it is no call, or returns None."""
    tree = ast.parse(check, mode="eval").body
    match tree:
        case ast.Compare(left=ast.expr() as left, ops=[ast.Eq()], comparators=[result]):
            try:
                return ast.get_source_segment(check, left) or "", ast.literal_eval(result)
            except ValueError:
                return None
        case ast.Call():
            return check, True
        case ast.UnaryOp(operand=ast.expr() as operand):
            return ast.get_source_segment(check, operand) or "", False
    return None


def _usage(lessons: list[Lesson], rng: random.Random) -> str:
    """Return how the lessons are used: prints, assertions, tests, a main function; often nothing."""
    kind = rng.choice(("", "", "", "", "print", "main guard", "main function", "assert", "test"))
    usable = [lesson for lesson in lessons if lesson.checks and has_all_methods(lesson)]
    if not kind or not usable:
        return ""
    if kind == "test":
        tests = []
        for lesson in usable:
            name = re.sub(r"(?<!^)(?=[A-Z])", "_", min(defined_names(lesson.code))).lower()
            lines = [*lesson.uses, *(f"assert {check}" for check in lesson.checks)]
            tests.append(f"def test_{name}():\n" + "".join(f"    {line}\n" for line in lines))
        return "\n\n".join(tests).rstrip("\n")
    lines = []
    for lesson in usable:
        lines += lesson.uses
        for check in lesson.checks:
            pair = _call_and_result(check)
            if kind == "assert" or pair is None:
                lines.append(f"assert {check}")
            else:
                lines.append(f"print({pair[0]})" + (f"  # {pair[1]}" if kind == "print" else ""))
    if kind == "main guard":
        return 'if __name__ == "__main__":\n' + "\n".join(f"    {line}" for line in lines)
    if kind == "main function":
        body = "\n".join(f"    {line}" for line in lines)
        return f'def main():\n{body}\n\n\nif __name__ == "__main__":\n    main()'
    return "\n".join(lines)


def has_all_methods(lesson: Lesson) -> bool:
    """Return whether the code has the methods that its uses and checks call."""
    called = set(re.findall(r"\.(\w+)\(", " ".join([*lesson.uses, *lesson.checks])))
    return all(f"def {name}(" in lesson.code for name in called)
