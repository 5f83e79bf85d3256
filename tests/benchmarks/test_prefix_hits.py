from __future__ import annotations

import json
from pathlib import Path

from typer import Typer
from typer.testing import CliRunner

from benchmarks.prefix_hits import hit_share, index_for, main


def test_what_came_before_is_a_hit_if_the_index_is_large_enough() -> None:
    prompts = [[bytes([prompt, block]) * 8 for block in range(100)] for prompt in range(1, 11)]
    assert hit_share([*prompts, *prompts], index_for(4, 500, 1 << 20), 4) == 0.5
    assert hit_share([*prompts, *prompts], index_for(1, 80, 1 << 20), 4) == 0.0


def test_it_prints_a_row_for_each_size(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    row = {"timestamp": 0, "input_length": 1000, "output_length": 1, "hash_ids": [1, 2]}
    trace.write_text((json.dumps(row) + "\n") * 2)
    app = Typer()
    app.command()(main)
    printed = CliRunner().invoke(app, [str(trace)])
    assert printed.exit_code == 0, printed.output
    assert printed.output.count("50.0%") == 4
    assert "45.2%" in printed.output, "every eighth block of 62"
