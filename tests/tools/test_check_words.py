from __future__ import annotations

from pathlib import Path

import pytest

from tools import check_words
from tools.check_words import INVENTED, check, clean_ones, main, updated


def words_in(source: str, path: str = "cluster/some.py") -> list[tuple[int, str]]:
    return sorted((finding.line, finding.words) for finding in check(path, source))


@pytest.mark.parametrize(
    "beginning", ["Of", "As", "Where", "Those", "That", "Whose", "What", "Who", "Which", "For whom"]
)
@pytest.mark.parametrize(
    ("line", "template"),
    [
        (1, '"""{} it is."""'),
        (2, 'def f() -> None:\n    """{} it is."""'),
        (2, 'class C:\n    r"""{} it is."""'),
        (3, 'class C:\n    x: int = 1\n    """{} it is."""'),
        (2, 'X = 1\n"""{} it is."""'),
        (1, 'typer.Option(help="{} it is.")'),
        (1, 'Field(1, description="{} it " "is.")'),
        (1, 'Option(help=f"{} it is.")'),
    ],
)
def test_a_text_that_begins_as_a_fragment_is_refused_at_its_line(beginning: str, line: int, template: str) -> None:
    assert words_in(template.format(beginning)) == [(line, f"{beginning} it is.")]


@pytest.mark.parametrize(
    "text", ["Offers.", "Assume that.", "The tokens of that.", "Whether it is.", "Return what it is."]
)
def test_a_text_with_a_subject_or_a_verb_passes(text: str) -> None:
    assert words_in(f'"""{text}"""') == []


def test_a_string_that_documents_nothing_may_begin_in_any_way() -> None:
    assert words_in('x = "What is it?"\nprint("Of one.", f(prompt="Who is it?"))') == []


INCARNATION = "life"
PROSE_WORDS = [word for word in INVENTED if word not in ("life", "places")]


@pytest.mark.parametrize(
    "word", [*PROSE_WORDS, "doors", "lent", "parked", "stranded", f"next {INCARNATION}", f"{INCARNATION} of an engine"]
)
@pytest.mark.parametrize(
    ("line", "template"),
    [
        (3, '"""Ask.\n\nGo to the {}.\n"""'),
        (2, "x = 1\n# the {} is there"),
        (1, 'Option(help="Take the {} now.")'),
        (1, 'logger.info("the {} is there")'),
        (2, '"""Ask."""\nraise ValueError(f"no {} at {{x}}")'),
    ],
)
def test_an_invented_word_in_prose_is_refused_at_its_line(word: str, line: int, template: str) -> None:
    assert words_in(template.format(word)) == [(line, word)]


@pytest.mark.parametrize("word", INVENTED)
@pytest.mark.parametrize(
    "template",
    ["def {}_of_it(): ...", "class Its{}: ...", "def f(the_{}): ...", "{} = 1", "self._{} = 1", "import x as {}"],
)
def test_an_invented_word_in_a_name_is_refused_where_the_name_is_defined(word: str, template: str) -> None:
    [(line, words)] = words_in(template.format(word.title() if "class" in template else word))
    assert line == 1
    assert word in words.lower()


def test_the_name_of_a_file_counts_and_names_from_elsewhere_do_not() -> None:
    word = PROSE_WORDS[0]
    assert words_in("", f"cluster/{word}.py") == [(1, word)]
    assert words_in(f"from x import {word}\n{word}.go()\nf({word}=1)") == []


def test_the_name_of_a_test_is_read_as_a_sentence() -> None:
    assert words_in("def test_it_lives_on_in_all_places(): ...") == []
    name = f"test_it_knows_the_next_{INCARNATION}"
    assert words_in(f"def {name}(): ...") == [(1, f"{name} (next {INCARNATION})")]


@pytest.mark.parametrize(
    "text",
    [
        "The life of a request.",
        "It lives on.",
        "gate_proj, gate_up_proj",
        "a feature gate",
        "Tests of actors/door.py.",
        "a surrogate, silent",
    ],
)
def test_plain_english_and_the_fields_own_words_pass(text: str) -> None:
    assert words_in(f'"""{text}"""') == []


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree with a clean file and an unclean one, and an empty list."""
    monkeypatch.setattr(check_words, "ROOT", tmp_path)
    monkeypatch.setattr(check_words, "TO_DO", tmp_path / "to_do.txt")
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "clean.py").write_text('"""The limits of one."""')
    (tmp_path / "cluster" / "unclean.py").write_text('"""Of one."""')
    (tmp_path / "cluster" / "some_pb2.py").write_text('"""Of one."""')
    return tmp_path


def test_an_unclean_file_fails_the_check_unless_it_is_listed(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 1
    assert capsys.readouterr().out.startswith("cluster/unclean.py:1: 'Of one.': begin with")
    (root / "to_do.txt").write_text("cluster/unclean.py\n")
    assert main([]) == 0
    assert capsys.readouterr().out == ""


def test_a_listed_file_that_is_clean_fails_the_check_until_the_list_is_updated(root: Path) -> None:
    (root / "to_do.txt").write_text("cluster/clean.py\ncluster/unclean.py\n")
    assert main([]) == 1
    assert main(["--update"]) == 0
    assert (root / "to_do.txt").read_text() == "cluster/unclean.py\n"
    assert main([]) == 0


def test_a_moved_file_passes_and_is_listed_under_its_new_path(root: Path) -> None:
    (root / "to_do.txt").write_text("cluster/gone.py\n")
    assert main([]) == 0
    assert main(["--update"]) == 0
    assert (root / "to_do.txt").read_text() == "cluster/unclean.py\n"


def test_no_more_files_pass_as_moved_than_are_gone(root: Path) -> None:
    assert updated(["cluster/clean.py"], {"cluster/unclean.py"}) == set()
    assert updated(["cluster/gone.py"], {"cluster/unclean.py", "cluster/clean.py"}) == set()
    assert clean_ones(["cluster/gone.py", "cluster/clean.py"], {"cluster/unclean.py"}) == ["cluster/clean.py"]
