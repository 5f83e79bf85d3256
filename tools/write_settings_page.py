"""Write docs/settings.md, the reference of all settings, from the pydantic models.

tests/cluster/test_settings_reference.py compares the page with the models.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from cluster.settings_reference import to_markdown

PAGE: Final = Path(__file__).parents[1] / "docs" / "settings.md"


if __name__ == "__main__":
    PAGE.write_text(to_markdown(), encoding="utf-8")
