"""One exercise of a textbook, and how it is spelled: under which names, with which choices and with which methods.

The files in exercises/ hold them. An exercise begins with a line `=== name: other, other; name: other`, which lists
names of its code and what else they may be called. Lines `use STATEMENT` and `check EXPRESSION` follow, which are true
of the code after `---`. Three marks are replaced in it:

    @{one|other}    one of the choices (@<one|other> within another choice); a backslash and n is a new line
    $name           in strings and comments: what `name` is called in this spelling
    #?              a line before a method: it may be left out
"""

import io
import random
import re
import tokenize
from dataclasses import dataclass
from pathlib import Path

_FOLDER = Path(__file__).parent / "exercises"
_OUTER_CHOICE = re.compile(r"@\{((?:[^{}]|\{[^{}]*\})*)\}")
_INNER_CHOICE = re.compile(r"@<([^<>]*)>")
_REFERENCE = re.compile(r"\$(\w+)")
_OPTIONAL = "    #?\n"
_OWN_NAME_PROBABILITY = 0.6
_KEPT_PROBABILITY = 0.5


@dataclass(frozen=True, slots=True)
class Lesson:
    """A piece of code with what holds for it, in one spelling.

    uses: statements that come before the checks. checks: expressions that are true then.
    """

    code: str
    uses: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Exercise:
    """An exercise in all its spellings."""

    names: dict[str, list[str]]
    uses: tuple[str, ...]
    checks: tuple[str, ...]
    template: str

    def spell(self, rng: random.Random) -> Lesson:
        """Return one spelling."""
        code = _choose(_leave_out(self.template, rng), rng)
        renamed = self._choose_names(rng, set(re.findall(r"\w+", code)))
        return Lesson(
            _rename(code, renamed),
            tuple(_rename(use, renamed) for use in self.uses),
            tuple(_rename(check, renamed) for check in self.checks),
        )

    def _choose_names(self, rng: random.Random, taken: set[str]) -> dict[str, str]:
        renamed = {}
        for name, others in self.names.items():
            free = [other for other in others if other not in taken]
            renamed[name] = name if not free or rng.random() < _OWN_NAME_PROBABILITY else rng.choice(free)
            taken.add(renamed[name])
        return renamed


def read_exercises() -> dict[str, list[Exercise]]:
    """Return the exercises of each file, in the order of the files' names."""
    return {path.stem: parse_exercises(path.read_text()) for path in sorted(_FOLDER.glob("*.txt"))}


def parse_exercises(text: str) -> list[Exercise]:
    """Return the exercises of a file."""
    return [_parse(part) for part in text.split("=== ")[1:]]


def _parse(part: str) -> Exercise:
    head, template = part.split("\n---\n")
    names_line, *lines = head.splitlines()
    names = {}
    for entry in names_line.split("; "):
        name, _, others = entry.partition(": ")
        names[name] = others.split(", ") if others else []
    return Exercise(
        names=names,
        uses=tuple(line.removeprefix("use ") for line in lines if line.startswith("use ")),
        checks=tuple(line.removeprefix("check ") for line in lines if line.startswith("check ")),
        template=template.rstrip() + "\n",
    )


def _leave_out(template: str, rng: random.Random) -> str:
    """Leave out some of the optional methods: those between a mark and the next blank line or mark."""
    kept, *optional = template.split(_OPTIONAL)
    for part in optional:
        method, *rest = re.split(r"\n\n(?=    def |    @|\w)", part, maxsplit=1)
        if rng.random() < _KEPT_PROBABILITY:
            kept = kept.rstrip("\n") + "\n\n" + method
        kept = kept.rstrip("\n") + "\n" + ("\n" + rest[0] if rest else "")
    return kept


def _choose(template: str, rng: random.Random) -> str:
    def pick(match: re.Match[str]) -> str:
        choices: list[str] = match[1].split("|")
        return rng.choice(choices).replace("\\n    ", "\n    ")

    return _OUTER_CHOICE.sub(pick, _INNER_CHOICE.sub(pick, template))


def _rename(code: str, renamed: dict[str, str]) -> str:
    """Rename what is code, and replace the references to names in what is text."""
    code = _REFERENCE.sub(lambda match: renamed.get(match[1], match[1]), code)
    lines = code.splitlines(keepends=True)
    for token in reversed(list(tokenize.generate_tokens(io.StringIO(code).readline))):
        if token.type != tokenize.NAME or token.string not in renamed:
            continue
        row, start = token.start
        line = lines[row - 1]
        # A module's member keeps its name.
        if not line[:start].endswith("os."):
            lines[row - 1] = line[:start] + renamed[token.string] + line[start + len(token.string) :]
    return "".join(lines)
