"""Record where memory and time go in a plain PyTorch loop, and write a report, without a GPU.

    python examples/profile_loop.py [directory]

The loop knows nothing of Penstock: phases are detected. For a whole program, this does the same
without a change: `penstock profile -o run/ -- python train.py`, then `penstock report run/`.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.utils.data import DataLoader

import penstock as ps
from penstock.observe.findings import find
from penstock.observe.measures import measure
from penstock.observe.page import page, verdict, write_page
from penstock.observe.run_files import read_run


def train(steps: int, width: int) -> None:
    """Train a small network as any program would."""
    model = torch.nn.Sequential(
        torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows = [torch.randn(width) for _ in range(32 * steps)]
    for batch in DataLoader(rows, batch_size=32):  # type: ignore[arg-type]
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def main(argv: Sequence[str] | None = None) -> Path:
    """Record the loop, print what the recording shows, and return the path of the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path, nargs="?")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--width", type=int, default=512)
    options = parser.parse_args(argv)
    folder = options.directory or Path(tempfile.mkdtemp(prefix="penstock-profile-"))
    with ps.observe(folder, interval=0.05):
        train(options.steps, options.width)

    measures = measure(read_run(folder))
    print(verdict(measures))
    for name, seconds in measures.phases.items():
        print(f"  {name:15} {1000 * seconds:.1f} ms per step")
    for finding in find(measures):
        print(f"  {finding.text}. {finding.action}")
    report = folder / "report.html"
    write_page(page(measures), report)  # as `penstock report` does
    print(f"{report} opens in any browser; {folder}/trace.json opens in ui.perfetto.dev")
    return report


if __name__ == "__main__":
    main()
