"""The part of the demo model's corpus that the interpreter ships: the standard library's hand-written modules."""

from pathlib import Path

HELD_OUT_EVERY_NTH_FILE = 40
EXCLUDED_FOLDERS = {"site-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__phello__"}
# Generated, or a table; the first two also hold the paths of the machine that built the interpreter.
EXCLUDED_FILES = ("_sysconfigdata*.py", "config-*/*.py", "html/entities.py", "msilib/*.py")


def read_modules(root: Path) -> list[str]:
    """Return the texts of the library's hand-written modules, in the order of their paths."""
    files = sorted(path.relative_to(root) for path in root.rglob("*.py"))
    texts = ((root / file).read_text(encoding="utf-8", errors="replace") for file in files if is_hand_written(file))
    return [text for text in texts if text.strip()]


def is_hand_written(file: Path) -> bool:
    """Return whether a file, relative to the library's root, is source that a person wrote and is no test."""
    in_excluded_folder = not EXCLUDED_FOLDERS.isdisjoint(file.parts)
    return not in_excluded_folder and not any(file.match(pattern) for pattern in EXCLUDED_FILES)


def split(texts: list[str]) -> tuple[list[str], list[str]]:
    """Return the training texts and the held-out ones."""
    held_out = texts[::HELD_OUT_EVERY_NTH_FILE]
    training = [text for index, text in enumerate(texts) if index % HELD_OUT_EVERY_NTH_FILE]
    return training, held_out
