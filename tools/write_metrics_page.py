"""Write docs/metrics.md, the reference of all metrics, from their declarations.

With `--check` the page is compared with the declarations instead, as `make check` does.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from cluster.observability.metrics_page import to_markdown

PAGE: Final = Path(__file__).parents[1] / "docs" / "metrics.md"


def main(arguments: list[str]) -> int:
    """Write or check the page. Returns the exit status."""
    page = to_markdown()
    if "--check" in arguments:
        is_current = PAGE.is_file() and PAGE.read_text(encoding="utf-8") == page
        if not is_current:
            print(f"{PAGE.name} does not say what the code says: run `make metrics`")
        return 0 if is_current else 1
    PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
