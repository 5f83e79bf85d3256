"""Change how a piece of Python is spelled, and not what it does: type hints, docstrings, comments, quotes."""

import ast
import io
import random
import re
import tokenize
from dataclasses import dataclass

_COMMENT_LINE = re.compile(r"^ *# .*\n", re.MULTILINE)
_PLAIN_STRING = re.compile(r'"[^"\'\\\n]*"')


@dataclass(frozen=True, slots=True)
class Style:
    """How a program is spelled. Without docstrings a class keeps the blank lines between its methods."""

    has_hints: bool
    has_docstrings: bool
    has_comments: bool
    has_single_quotes: bool

    @classmethod
    def draw(cls, rng: random.Random) -> "Style":
        """Draw a style."""
        return cls(
            has_hints=rng.random() < 0.35,
            has_docstrings=rng.random() < 0.65,
            has_comments=rng.random() < 0.6,
            has_single_quotes=rng.random() < 0.25,
        )


def respell(code: str, style: Style) -> str:
    """Return the code in a style. It has to have hints, docstrings and comments and double quotes."""
    if not style.has_comments:
        code = _COMMENT_LINE.sub("", code)
    if not style.has_docstrings:
        code = without_docstrings(code)
    if not style.has_hints:
        code = without_hints(code)
    if style.has_single_quotes:
        code = with_single_quotes(code)
    return code


def without_docstrings(code: str) -> str:
    """Leave out the docstrings, and the blank line after one at the head of a class."""
    lines = code.splitlines(keepends=True)
    for node in reversed(list(_definitions(code))):
        first = node.body[0]
        if ast.get_docstring(node) is not None and len(node.body) > 1:
            assert first.end_lineno is not None
            stop = first.end_lineno
            while isinstance(node, ast.ClassDef) and not lines[stop].strip():
                stop += 1
            del lines[first.lineno - 1 : stop]
    return "".join(lines)


def without_hints(code: str) -> str:
    """Leave out the hints of parameters, results and attributes; those of a dataclass's fields stay.

    A signature has to be on one line.
    """
    lines = code.splitlines(keepends=True)
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.FunctionDef):
            bare = ast.FunctionDef(node.name, _without_annotations(node.args), [ast.Pass()], [])
            head = ast.unparse(ast.fix_missing_locations(bare)).splitlines()[0]
            lines[node.lineno - 1] = " " * node.col_offset + head + "\n"
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            lines[node.lineno - 1] = " " * node.col_offset + f"{ast.unparse(node.target)} = {ast.unparse(node.value)}\n"
    return "".join(lines)


def with_single_quotes(code: str) -> str:
    """Put strings into single quotes where that needs no escape."""
    lines = code.splitlines(keepends=True)
    for token in reversed(list(tokenize.generate_tokens(io.StringIO(code).readline))):
        if token.type == tokenize.STRING and _PLAIN_STRING.fullmatch(token.string):
            row, start = token.start
            line = lines[row - 1]
            lines[row - 1] = f"{line[:start]}'{token.string[1:-1]}'{line[token.end[1] :]}"
    return "".join(lines)


def _definitions(code: str) -> list[ast.ClassDef | ast.FunctionDef]:
    found = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    return sorted(found, key=lambda node: node.lineno)


def _without_annotations(arguments: ast.arguments) -> ast.arguments:
    for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]:
        if argument is not None:
            argument.annotation = None
    return arguments
