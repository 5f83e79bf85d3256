"""Write cluster/client/sampling_keywords.py from the declarations of the sampling parameters.

With `--check` the file is compared with the declarations instead, as `make check` does.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from cluster.parameters.sampling_options import PARAMETERS

FILE: Final = Path(__file__).parents[1] / "cluster" / "client" / "sampling_keywords.py"
_HEAD: Final = '''"""The keywords of sampling parameters. `make client` writes them as they are declared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict


class SamplingKeywords(TypedDict, total=False):
    """The fields of raypd.v1.SamplingParams, which says what each of them means. What is absent has its default."""

'''
_TYPES: Final[dict[object, str]] = {
    float: "float",
    int: "int",
    bool: "bool",
    tuple[str, ...]: "str | Sequence[str]",
    tuple[int, ...]: "Sequence[int]",
    dict[int, float]: "Mapping[int, float]",
}


def written() -> str:
    """Return the file's text."""
    declared = (one for one in PARAMETERS.values() if not one.other_words.client)
    return _HEAD + "".join(f"    {one.name}: {_TYPES[one.kind]}\n" for one in declared)


def main(arguments: list[str]) -> int:
    """Write or check the file. Returns the exit status."""
    if "--check" in arguments:
        is_current = FILE.read_text(encoding="utf-8") == written()
        if not is_current:
            print(f"{FILE.name} does not say what the declarations say: run `make client`")
        return 0 if is_current else 1
    FILE.write_text(written(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
