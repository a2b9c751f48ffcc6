"""The tables of docs/fit.md have a row for each model and a column for each amount of DRAM."""

from __future__ import annotations

from bench.fit_table import BUDGETS, predict, tables


def test_tables_say_what_fits() -> None:
    """Gemma 2 has 8,192 positions, so it has no row of numbers at 32,768."""
    short, long = tables(predict(("gemma-2-9b",))).split("\n\n")

    assert len(short.splitlines()) == len(long.splitlines()) == 3
    (row,) = short.splitlines()[2:]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:2] == ["gemma-2-9b", "9.2 B"]
    assert len(cells) == 2 + len(BUDGETS)
    assert cells[2].endswith(" GiB NVMe")  # 129 GB of states in 57 GiB
    assert "NVMe" not in cells[-1]  # and in 179 GiB
    assert long.count("8,192 positions") == len(BUDGETS)
