"""`raypd token`, and the options with which client commands authenticate."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from rich.console import Console

from cluster.access.tokens import TokenEntry, hash_token, make_token
from cluster.errors import InvalidConfig


def use_credentials(options: dict[str, Path | bool | None]) -> None:
    """Set the environment variables from which this process's clients take their credentials.

    options: values by the variable's name without RAYPD_, as in Credentials.from_environment()
    """
    for name, value in options.items():
        if value:
            os.environ[f"RAYPD_{name}"] = "1" if value is True else str(value)


def print_new_token(console: Console, **settings: Any) -> None:
    """Create a token, and print it and its entry for the token file. Raises InvalidConfig.

    settings: the fields of TokenEntry, except sha256
    """
    token = make_token()
    try:
        entry = TokenEntry(sha256=hash_token(token), **settings)
    except ValidationError as error:
        mistakes = [f"{mistake['loc'][0]} = {mistake['input']!r}: {mistake['msg']}" for mistake in error.errors()]
        raise InvalidConfig("token", mistakes) from error
    shown = entry.model_dump(mode="json", exclude_defaults=True, exclude_none=True)
    console.print("The token, which is not stored anywhere:", highlight=False)
    console.print(f"  {token}", highlight=False, soft_wrap=True)
    console.print("Below `tokens:` in the token file:", highlight=False)
    text = yaml.safe_dump([shown], sort_keys=False).rstrip()
    console.print("\n".join(f"  {line}" for line in text.splitlines()), highlight=False, soft_wrap=True, markup=False)
