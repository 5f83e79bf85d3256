"""Try every model type, and write the table of docs/models.md: `python -m tests.models`

With names of model types, try those and print their rows instead.
"""

from __future__ import annotations

import sys

from tests.models.children import try_all
from tests.models.table import row_of, write
from tests.models.tiny_configs import MODEL_TYPES


def main(model_types: list[str]) -> int:
    """Returns the exit status: 1 if a model type is neither served right nor refused."""
    outcomes = try_all(model_types or MODEL_TYPES)
    faults = [f"{outcome.model_type}: {outcome.fault}\n" for outcome in outcomes.values() if outcome.fault]
    if model_types:
        sys.stdout.writelines(row_of(outcome) for outcome in outcomes.values() if not outcome.fault)
    elif not faults:
        write(outcomes)
    sys.stderr.writelines(faults)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
