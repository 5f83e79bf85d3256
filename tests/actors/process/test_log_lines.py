"""A log line says what happened, to whom, and why."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from actors.process.log_lines import LEVEL_VARIABLE, LineFormatter


def _line(message: str, **fields: object) -> str:
    record = logging.getLogger("cluster.pool").makeRecord(
        "cluster.pool", logging.WARNING, "file.py", 7, message, (), None, extra=fields
    )
    record.created, record.msecs = 1795352500.5, 500.0
    return LineFormatter().format(record)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("decode-0", "decode-0"),
        (3, "3"),
        (0.25, "0.25"),
        (None, "None"),
        ("", '""'),
        ("two words", '"two words"'),
        ('a "quote"', '"a \\"quote\\""'),
        ("a=b", '"a=b"'),
        ("two\nlines", '"two\\nlines"'),
        ("été", "été"),
        (ConnectionError("it is gone"), '"it is gone"'),
    ],
)
def test_fields_follow_the_message(value: object, shown: str) -> None:
    expected = f"2026-11-22T13:01:40.500Z WARNING cluster.pool an engine died engine_id={shown}"
    assert _line("an engine died", engine_id=value) == expected


def test_what_libraries_add_to_each_record_is_no_field() -> None:
    assert _line("an engine died", _added=7).endswith(" an engine died")


def test_several_fields_stand_in_their_order() -> None:
    assert _line("an engine died", engine_id="p", error="of old age").endswith(' engine_id=p error="of old age"')
    assert _line("an engine died").endswith(" an engine died")


def _said(program: str, monkeypatch: pytest.MonkeyPatch, level: str | None = None) -> str:
    """To stderr, by a process of its own: in this one pytest has set logging up."""
    if level is None:
        monkeypatch.delenv(LEVEL_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(LEVEL_VARIABLE, level)
    code = f"import logging\nfrom actors.process.log_lines import write_log_lines\n{program}"
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stderr


_TALK = """
write_log_lines()
write_log_lines()
logging.getLogger("actors.core").debug("d")
logging.getLogger("cluster.pool").info("i", extra={"engine_id": "p"})
logging.getLogger("kv_transfer").error("e")
logging.getLogger("transformers").info("not ours")
"""


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        (None, ["INFO cluster.pool i engine_id=p", "ERROR kv_transfer e"]),
        ("debug", ["DEBUG actors.core d", "INFO cluster.pool i engine_id=p", "ERROR kv_transfer e"]),
        ("ERROR", ["ERROR kv_transfer e"]),
    ],
)
def test_each_record_is_one_line_from_a_level_on(
    level: str | None, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = _said(_TALK, monkeypatch, level).splitlines()
    assert [line.partition(" ")[2] for line in lines] == expected


def test_a_level_that_there_is_not_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    first, *others = _said(_TALK, monkeypatch, "loud").splitlines()
    assert first.endswith("WARNING kv_transfer the log level is unknown, so INFO is used RAYPD_LOG_LEVEL=loud")
    assert len(others) == 2


def test_logging_that_was_set_up_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    said = _said(f"logging.basicConfig(format='mine: %(message)s', level='WARNING')\n{_TALK}", monkeypatch)
    assert said == "mine: e\n"
