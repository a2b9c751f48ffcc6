"""What is expected of every family, and the page of the documentation that lists it.

`python -m tests.conformance_models.expected` runs every case, or the cases that are named after it,
and writes both files again. Read the difference before you commit it: a family may become right or
refused, but never wrong.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import transformers

from tests.conformance_models.check import Outcome, examine
from tests.conformance_models.tiny import FAMILIES, VARIANTS

FILE = Path(__file__).with_name("expected.json")
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "families.md"
CASES = (*FAMILIES, *VARIANTS)


def expected() -> dict[str, Outcome]:
    """Return what is expected of each case."""
    return {case: Outcome(**fields) for case, fields in _load()["cases"].items()}


def recorded_version() -> str:
    """Return the version of transformers that the list was made with."""
    return str(_load()["transformers"])


def shorten(outcome: Outcome) -> Outcome:
    """Return an outcome without what changes from run to run: line numbers and advice."""
    text = re.sub(r" \([^()]*\.py:\d+[^()]*\)$", "", outcome.text)
    if outcome.kind != "right":
        text = re.split(r"; |\. |: looked for|: Unrecognized|\.$", text, maxsplit=1)[0]
    return Outcome(outcome.kind, text)


_INTRODUCTION = """\
# Model families

This page lists every causal language model of transformers {version}, and every multimodal model
that may contain one. Of a multimodal model, Penstock trains the text stack and saves all other
tensors unchanged. The tests build a tiny model
of each class (`tests/conformance_models`) and compare one streamed step in bf16 on a CPU with the
plain model: the loss and every gradient. They also check that later tokens change no earlier loss,
that packed documents do not see each other, and that a saved checkpoint loads in transformers and
in Penstock.

- **right**: all of this holds. The number is the largest relative difference between a gradient and
  its value in fp32. It comes from rounding to bf16: the plain model in bf16 has such differences
  too. Models with experts are compared in fp32, where it is 0.0000: rounding to bf16 changes which
  experts some tokens choose, in the plain model too.
- **refused**: `prepare` raises an error with this reason before it allocates memory.

A name with a colon is another config of the same class, one that runs other code. `python -m
tests.conformance_models.expected` generates this page, and the tests compare it with what they
find. A class that a new release of transformers adds fails the tests until it is one of the two.

"""


_RUNS = """
## Whole runs

For the families that people use, `tests/equivalence/test_family_runs.py` also compares whole runs:
20 steps of `penstock train --dtype fp32` with warmup, clipping, weight decay and several
micro-batches, streamed from DRAM and a disk, against transformers, `torch.optim.AdamW` and
`clip_grad_norm_`, which compute one document after another. The table has the largest relative
difference of a loss, on packed data and with one document per row, and how far losses of plain
transformers in fp32 are from those in fp64. Qwen 3.5 and LFM2 have one document per row either way.
The tiny Qwen 3.5 has a larger `rms_norm_eps` than the published one, with which losses of plain
transformers in fp32 and in fp64 differ by 1.4e-5. `bench/family_runs.py` writes
[the file with all numbers](../bench/results/{name}).

| family | packed | unpacked | transformers, fp32 to fp64 |
|---|---|---|---|
"""


def runs_table(path: Path) -> str:
    """Return the part of the page about whole runs, from a results file."""
    families = json.loads(path.read_text())["results"]["families"]
    lines = []
    for family, runs in families.items():
        packed, unpacked = (runs[kind]["difference"]["loss"] for kind in ("packed", "unpacked"))
        spread = max(run["spread"]["loss"] for run in runs.values())
        lines.append(f"| {family} | {packed:.1e} | {unpacked:.1e} | {spread:.1e} |\n")
    return _RUNS.format(name=path.name) + "".join(lines)


def page(cases: Mapping[str, Outcome], version: str) -> str:
    """Return the page of the documentation."""
    files = (ROOT / "bench" / "results").glob("family_runs_fp32_*.json")
    newest = max(files, key=lambda path: path.stem.rpartition("_")[2])
    right = sum(outcome.kind == "right" for outcome in cases.values())
    lines = [
        f"{right} configs are right, and {len(cases) - right} are refused.",
        "",
        "| model type | class | result | largest difference, or reason |",
        "|---|---|---|---|",
    ]
    for case in sorted(cases):
        kind = FAMILIES.get(VARIANTS.get(case, (case, {}))[0], "?")
        outcome = cases[case]
        text = outcome.text.replace("|", "\\|")
        lines.append(f"| {case} | `{kind}` | {outcome.kind} | {text} |")
    table = "\n".join(lines) + "\n"
    return _INTRODUCTION.format(version=version) + table + runs_table(newest)


def _load() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(FILE.read_text())
    return loaded


def _update(cases: Sequence[str]) -> None:
    import torch

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    found = {case: o for case, o in expected().items() if case not in cases and case in CASES}
    for case in cases:
        with tempfile.TemporaryDirectory() as folder:
            outcome = examine(case, Path(folder))
        sys.stdout.write(f"{case}: {outcome}\n")
        sys.stdout.flush()
        found[case] = shorten(outcome)
    record = {
        "transformers": transformers.__version__,
        "cases": {case: {"kind": found[case].kind, "text": found[case].text} for case in CASES},
    }
    FILE.write_text(json.dumps(record, indent=1) + "\n")
    PAGE.write_text(page(found, transformers.__version__))


if __name__ == "__main__":
    _update(sys.argv[1:] or CASES)
