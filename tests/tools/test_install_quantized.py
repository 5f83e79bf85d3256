"""bitsandbytes and torchao get a folder of their own, and whoever cannot have them is told so."""

from __future__ import annotations

import pytest

from tools import install_quantized


@pytest.mark.parametrize(
    ("arguments", "last"),
    [([], install_quantized.REQUIREMENTS), (["gptq"], ("--no-build-isolation", *install_quantized.GPTQ_REQUIREMENTS))],
)
def test_they_are_installed_beside_the_environment(
    arguments: list[str], last: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, ...]] = []

    def install(*wanted: str) -> int:
        calls.append(wanted)
        return 0

    monkeypatch.setattr(install_quantized, "install", install)
    monkeypatch.setenv("BUILD_CUDA_EXT", "")
    install_quantized.main(arguments)
    [call] = calls
    assert call[:2] == ("--no-deps", "--target")
    assert call[3:] == last


def test_the_reason_is_told_if_they_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install_quantized, "install", lambda *wanted: 1)
    with pytest.raises(SystemExit, match=r"bitsandbytes==.* and torchao==.* cannot be had"):
        install_quantized.main([])
