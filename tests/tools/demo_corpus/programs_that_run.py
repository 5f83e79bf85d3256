"""Run the code of the demo model's corpus, as tests of it."""

import contextlib
import io

from tools.demo_corpus.exercise import Lesson
from tools.demo_corpus.programs import has_all_methods, imports_of


def run(program: str, name: str = "program") -> dict[str, object]:
    """Run a program. Returns its names."""
    names: dict[str, object] = {"__name__": name, "input": lambda _prompt: "50"}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(program, name, "exec"), names)
    return names


def assert_that_it_holds(lesson: Lesson) -> None:
    """Run a lesson, and if none of the methods that they need was left out, its checks."""
    checks = [f"assert {check}" for check in lesson.checks] if has_all_methods(lesson) else []
    text = "\n".join([lesson.code, *(lesson.uses if checks else ()), *checks])
    run(imports_of(text) + "\n" + text)
