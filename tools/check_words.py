"""Hold the words of docstrings, comments, help texts, descriptions, messages and names against the rules of style.

`python -m tools.check_words` prints what is wrong, with its file and line; given paths of files, also what is wrong in
those although they are listed. Files in words_to_do.txt are not clean yet; the list may only become shorter, so a
listed file without a finding is an error as well. `--update` takes clean files off the list, and lists moved ones
under their new paths; until then a moved file passes.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
TO_DO: Final = Path(__file__).with_name("words_to_do.txt")
FOLDERS: Final = ("cluster", "actors", "kv_transfer", "tests", "benchmarks", "tools")

_GENERATED: Final = re.compile(r"_pb2(_grpc)?\.pyi?$")
_FRAGMENT: Final = re.compile(
    r"(?:Of|As|Where|Those|That|Whose|What|Who|Whom|Which|Whoever|Whatever"
    r"|(?:For|To|By|From|In|On|With) wh(?:om|at|ich|ose))\b"
)
_ADVICE: Final = "begin with the subject of a sentence, or with a verb"
_HELP_KEYWORDS: Final = frozenset({"help", "short_help", "description", "epilog", "documentation", "summary"})

INVENTED: Final = {
    "door": "endpoint, server or API",
    "gate": "the thing itself: a limit, a check, an event",
    "seat": "slot",
    "lend": "serve or share",
    "loan": "served blocks, a transfer",
    "shelf": "store, cache or buffer",
    "park": "hold back, keep pending",
    "doom": "failing, that will fail",
    "strand": "unreachable, cut off",
    "unsaid": "unset, unreported",
    "outbox": "send queue, pending messages",
    "wish": "request, preference",
    "life": "incarnation",
    "places": "queues, slots, placements",
}
"""Each invented word and what to write instead."""

_FORMS: Final = {
    form: word
    for word, forms in {
        "door": ("doors",),
        "gate": (
            "gates",
            "gated",
        ),
        "seat": (
            "seats",
            "seated",
        ),
        "lend": (
            "lends",
            "lent",
            "lending",
            "lender",
            "lenders",
        ),
        "loan": ("loans",),
        "shelf": (
            "shelves",
            "shelve",
            "shelved",
        ),
        "park": (
            "parks",
            "parked",
            "parking",
        ),
        "doom": (
            "dooms",
            "doomed",
        ),
        "strand": (
            "strands",
            "stranded",
        ),
        "outbox": ("outboxes",),
        "wish": (
            "wishes",
            "wished",
        ),
        "life": ("lives",),
    }.items()
    for form in forms
}
_ONLY_IN_NAMES: Final = frozenset({"life", "places"})
"""Words that are plain English in a sentence, but not as the name of a class or variable."""

_INCARNATION: Final = re.compile(
    r"\b(?:a|one|this|next|earlier|former|another|new|later|further|first|each|every|last|latest|other|both|two)\s(?:life|lives)\b"
    r"|\b(?:life|lives)\sof\s(?:(?:an?|one|the|this|each)\s)?(?:engine|ingress|controller|consumer|producer|rank)\b",
    re.IGNORECASE,
)
_PLAIN: Final = re.compile(r"gate_(?:up_)?proj|feature[\s_]gates?|[\w/]+\.py\b", re.IGNORECASE)
"""Names of weights and Kubernetes' feature gates, which are the field's own words; and paths."""


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """One offence against the rules, at a line of a file."""

    path: str
    line: int
    words: str
    advice: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.words!r}: {self.advice}"


def main(arguments: list[str]) -> int:
    """Print what is wrong, or update the list. Returns the exit status."""
    findings = {path: found for path in sources() if (found := sorted(check(path, (ROOT / path).read_text("utf-8"))))}
    to_do = TO_DO.read_text("utf-8").split() if TO_DO.exists() else []
    allowed = updated(to_do, findings)
    if "--update" in arguments:
        TO_DO.write_text("".join(f"{path}\n" for path in sorted(allowed)), "utf-8")
        return 0
    clean = clean_ones(to_do, findings)
    for path, found in findings.items():
        if path not in allowed or path in arguments:
            print(*found, sep="\n")
    if clean:
        print(
            "Clean, but still listed (take them off with `python -m tools.check_words --update`):", *clean, sep="\n  "
        )
    return 1 if clean or findings.keys() - allowed else 0


def sources() -> Iterator[str]:
    """Yield the path of each Python file that is written by hand, relative to the root."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not _GENERATED.search(path.name):
                yield path.relative_to(ROOT).as_posix()


def clean_ones(to_do: Iterable[str], findings: Iterable[str]) -> list[str]:
    """Return the listed files that exist and have no finding."""
    return sorted(path for path in set(to_do) - set(findings) if (ROOT / path).exists())


def updated(to_do: Iterable[str], findings: Iterable[str]) -> set[str]:
    """Return the list without clean files, and with the new paths of moved ones.

    Files that are not listed pass for moved ones unless they are more than the listed ones that are gone.
    """
    listed, unclean = set(to_do), set(findings)
    num_gone = sum(not (ROOT / path).exists() for path in listed)
    new = unclean - listed
    return (listed & unclean) | (new if len(new) <= num_gone else set())


def check(path: str, source: str) -> Iterator[Finding]:
    """Yield what is wrong in one file, in no order."""
    tree = ast.parse(source)
    texts = list(_texts(tree))
    for line, text in texts:
        if match := _FRAGMENT.match(text.lstrip()):
            yield Finding(path, line, _beginning(text.lstrip(), match), _ADVICE)
    prose = [*texts, *_strings(tree, {text for _, text in texts}), *_comments(source)]
    for line, text in prose:
        for offset, words, advice in invented_words(text):
            yield Finding(path, line + text.count("\n", 0, offset), words, advice)
    for line, name in [(1, Path(path).stem), *_names(tree)]:
        for words, advice in invented_parts(name):
            yield Finding(path, line, f"{name} ({words})" if words != name else name, advice)


def invented_words(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield where an invented word is in a text, the word and the advice. Names of code in the text count as theirs."""
    text = _PLAIN.sub(lambda match: " " * len(match[0]), text)
    for match in re.finditer(r"[A-Za-z]+", text):
        word = _FORMS.get(match[0].lower(), match[0].lower())
        if word in INVENTED and word not in _ONLY_IN_NAMES:
            yield match.start(), match[0], f"write {INVENTED[word]}"
    for match in _INCARNATION.finditer(text):
        yield match.start(), match[0], f"write {INVENTED['life']}"


def invented_parts(name: str) -> Iterator[tuple[str, str]]:
    """Yield each invented word in a name and the advice. The name of a test is a sentence."""
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", _PLAIN.sub("", name))
    if name.startswith("test_"):
        yield from ((found, advice) for _, found, advice in invented_words(" ".join(words)))
        return
    for word in words:
        key = _FORMS.get(word.lower(), word.lower())
        if key in INVENTED:
            yield word, f"write {INVENTED[key]}"


def _beginning(text: str, match: re.Match[str]) -> str:
    return " ".join(text[: match.end() + 30].split("\n")[0].split()[:5])


def _texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Docstrings of modules, classes, functions and attributes; help texts and descriptions."""
    for node in ast.walk(tree):
        for body in (getattr(node, "body", None), getattr(node, "orelse", None)):
            for statement in body if isinstance(body, list) else ():
                if isinstance(statement, ast.Expr) and (text := _text_of(statement.value)) is not None:
                    yield statement.lineno, text
        if isinstance(node, ast.Call):
            for keyword in node.keywords:
                if keyword.arg in _HELP_KEYWORDS and (text := _text_of(keyword.value)) is not None:
                    yield keyword.value.lineno, text


def _strings(tree: ast.Module, seen: set[str]) -> Iterator[tuple[int, str]]:
    """Other strings that are prose: messages of errors and logs, what is printed."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value not in seen:
            yield from [(node.lineno, node.value)] if re.search(r"\s", node.value.strip()) else ()


def _text_of(node: ast.expr) -> str | None:
    """The text of a string or an f-string, without what is put into it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return None


def _comments(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def _names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The names that a file defines: of functions, classes, parameters, variables and attributes, each once."""
    seen = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                pass
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                pass
            case ast.alias(asname=str(name)):
                pass
            case _:
                continue
        if name not in seen:
            seen.add(name)
            yield node.lineno, name


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
