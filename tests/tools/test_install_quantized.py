"""bitsandbytes and torchao get a folder of their own, and whoever cannot have them is told so."""

from __future__ import annotations

import pytest

from tools import install_quantized


def test_they_are_installed_beside_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, ...]] = []

    def install(*wanted: str) -> int:
        calls.append(wanted)
        return 0

    monkeypatch.setattr(install_quantized, "install", install)
    install_quantized.main()
    [call] = calls
    assert call[:2] == ("--no-deps", "--target")
    assert call[3:] == install_quantized.REQUIREMENTS


def test_the_reason_is_told_if_they_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install_quantized, "install", lambda *wanted: 1)
    with pytest.raises(SystemExit, match=r"bitsandbytes==.* and torchao==.* cannot be had"):
        install_quantized.main()
