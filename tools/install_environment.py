"""Install raypd for its developers into the environment whose Python runs this: `python -m tools.install_environment`

By uv, in a quarter of pip's time. uv does not read pip's settings, so it is told those that say where packages are; if
it fails all the same, pip has its turn. Needs nothing but pip.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from typing import Final

_TRITON: Final = "triton==3.9.0"
"""Tests interpret and compile kernels with it. constraints.txt lacks it: CUDA builds of torch name a version."""
_WANTED: Final = ("-c", "constraints.txt", "-e", ".[dev]", _TRITON)
_SCOPES: Final = ("global", "install", ":env:")
"""The scopes of pip's settings; a setting in a later one counts."""
_OPTIONS: Final = {
    "index-url": "--default-index",
    "extra-index-url": "--index",
    "find-links": "--find-links",
    "trusted-host": "--allow-insecure-host",
}


def main() -> None:
    """Install; ends as the installer does."""
    sys.exit(install(*_WANTED))


def install(*wanted: str) -> int:
    """Install by uv, or by pip if uv fails, and return the installer's exit status. wanted: their common arguments"""
    pip = (sys.executable, "-m", "pip")
    quiet = ("--quiet", "--disable-pip-version-check", "--no-compile", "-c", "constraints.txt")
    if subprocess.run([*pip, "install", *quiet, "uv"], check=False).returncode == 0:
        listed = subprocess.run([*pip, "config", "list"], check=True, capture_output=True, text=True).stdout
        options = uv_options(listed)
        uv = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", sys.executable]
        if subprocess.run([*uv, *options, *wanted], env=uv_environment(listed), check=False).returncode == 0:
            return 0
        print("uv could not install it, pip tries", file=sys.stderr)
    return subprocess.run([*pip, "install", *quiet, *wanted], check=False).returncode


def uv_options(listed: str) -> list[str]:
    """Return the options with which uv looks where pip would, and takes the best version wherever it is, as pip does.

    listed: by `pip config list`, lines such as global.find-links='/wheels'
    """
    settings = _settings(listed)
    options = ["--index-strategy", "unsafe-best-match"]
    for name, option in _OPTIONS.items():
        for value in settings.get(name, "").split():
            options += [option, value]
    return options + ["--no-index"] * (settings.get("no-index", "") in {"1", "true", "True", "yes"})


def uv_environment(listed: str) -> dict[str, str]:
    """With pip's certificates, if it has any of its own."""
    certificates = _settings(listed).get("cert")
    return dict(os.environ) | ({"SSL_CERT_FILE": certificates} if certificates else {})


def _settings(listed: str) -> dict[str, str]:
    found: dict[str, dict[str, str]] = {scope: {} for scope in _SCOPES}
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        scope, _, key = name.rpartition(".")
        if scope in found:
            found[scope][key] = str(ast.literal_eval(value))
    return {key: value for scope in _SCOPES for key, value in found[scope].items()}


if __name__ == "__main__":
    main()
