from pathlib import Path

from tools.demo_corpus.standard_library import read_modules, split


def test_tests_tables_and_generated_files_are_left_out(tmp_path: Path) -> None:
    for name in ("a.py", "b/c.py", "test/d.py", "encodings/e.py", "_sysconfigdata_f.py", "html/entities.py", "g.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "empty.py").touch()
    assert read_modules(tmp_path) == ["a.py", "b/c.py"]


def test_every_fortieth_file_is_held_out() -> None:
    training, held_out = split([str(number) for number in range(81)])
    assert held_out == ["0", "40", "80"]
    assert len(training) == 78
