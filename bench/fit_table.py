"""Predict which well-known models a desktop can train: the tables of docs/fit.md.

    python -m bench.fit_table [--save]

Nothing is measured. Every row is what `penstock fit` says for a preset with the memory that such
machines have. The tables are printed as Markdown.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from bench.certificate import save
from penstock.cli.fit import CONTEXTS, find_rows
from penstock.engine.plan_choice import budget_paths
from penstock.model.known_models import KNOWN_MODELS
from penstock.probe.machine_choice import machine_to_plan_for
from penstock.settings import Settings
from penstock.units import GiB, format_seconds

MACHINE = "desktop-24gb"
NVME = "/mnt/nvme:900GiB"
BUDGETS = {64: "57GiB", 128: "118GiB", 192: "179GiB"}
"""By GiB of DRAM that are installed: the budget that `auto` takes of them."""

Row = Mapping[str, Any]
"""What `penstock fit --json` prints of one model and context."""


def predict(models: Sequence[str]) -> dict[str, list[Row]]:
    """Return the rows for each amount of DRAM."""
    found: dict[str, list[Row]] = {}
    for installed, dram in BUDGETS.items():
        settings = Settings.of({"dram": dram, "nvme": [NVME]})
        target = machine_to_plan_for(MACHINE, budget_paths(settings.memory.budgets))
        rows = found[str(installed)] = []
        for row in find_rows(models, CONTEXTS, settings, target, fixed_batch=False):
            rows.append(row.to_json())
            print(f"{installed} GiB: {row.model}, context {row.context:,}", file=sys.stderr)
    return found


def tables(found: Mapping[str, Sequence[Row]]) -> str:
    """Return a Markdown table for each context."""
    titles = [f"{i} GiB installed, budget {b.removesuffix('GiB')} GiB" for i, b in BUDGETS.items()]
    parts = []
    for context in CONTEXTS:
        lines = [f"| {' | '.join(['model', 'parameters', *titles])} |", "|---" * 5 + "|"]
        columns = [[row for row in rows if row["context"] == context] for rows in found.values()]
        for rows in zip(*columns, strict=True):
            size = f"{rows[0]['parameters'] / 1e9:.1f} B"
            lines.append(f"| {' | '.join([rows[0]['model'], size, *map(cell, rows)])} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def cell(row: Row) -> str:
    """Return what one amount of DRAM means for a model."""
    if row["batch"] is None:
        return f"{row['positions']:,} positions"
    if not row["fits"]:
        return "no"
    text = f"{format_seconds(row['step_seconds'])}, {row['tokens_per_second']:,.0f} tokens/s"
    on_disk = row["tiers"]["nvme"]
    return f"{text}, {on_disk / GiB:.0f} GiB NVMe" if on_disk else text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", help="default: all that `penstock fit` knows")
    parser.add_argument("--save", action="store_true", help="write a file to bench/results")
    args = parser.parse_args()
    found = predict(args.models or tuple(KNOWN_MODELS))
    print(tables(found))
    if args.save:
        save(
            f"fit_{MACHINE}", {"machine": MACHINE, "nvme": NVME, "budgets": BUDGETS, "rows": found}
        )


if __name__ == "__main__":
    main()
