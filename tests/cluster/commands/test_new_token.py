from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from cluster.access.tokens import Tokens
from cluster.client.client_credentials import Credentials
from cluster.commands.new_token import print_new_token, use_credentials
from cluster.errors import InvalidConfig


def test_a_new_token_is_known_once_its_entry_is_in_the_file(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=40)
    print_new_token(console, name="alice", tenant="team", admin=True, concurrent=3)
    shown = console.file.getvalue()  # type: ignore[attr-defined]  # a StringIO
    secret = re.search(r"raypd-\S+", shown)
    assert secret is not None

    path = tmp_path / "tokens.yaml"
    path.write_text("tokens:\n" + shown.partition("token file:\n")[2])
    caller = Tokens(path).find(secret[0])
    assert caller is not None
    assert (caller.name, caller.tenant, caller.may_administer) == ("alice", "team", True)
    assert yaml.safe_load(path.read_text())["tokens"][0]["concurrent"] == 3
    assert secret[0] not in path.read_text()


def test_a_name_that_cannot_be_used_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="name = 'a/b'"):
        print_new_token(Console(file=io.StringIO()), name="a/b")


def test_options_of_the_command_line_are_those_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TOKEN", "TOKEN_FILE", "TLS", "TLS_CA", "INSECURE"):
        monkeypatch.delenv(f"RAYPD_{name}", raising=False)
        monkeypatch.setenv(f"RAYPD_{name}", "")
    assert Credentials.from_environment() == Credentials()
    path = tmp_path / "token"
    path.write_text("secret\n")

    use_credentials({"TOKEN_FILE": path, "TLS": True, "TLS_CA": None, "INSECURE": False})

    assert Credentials.from_environment() == Credentials("secret", tls=True)
    with pytest.raises(InvalidConfig, match="cannot be read"):
        Credentials.from_environment({"RAYPD_TOKEN_FILE": str(tmp_path / "nothing")})
