"""Compare 20 steps of `penstock train` with plain transformers, for every family people use.

    python bench/family_runs.py --save
    python bench/family_runs.py --only "Gemma 3" "Phi 3"
    python bench/family_runs.py --gpu --save

Each family is trained in fp32 on the CPU, on packed and on unpacked data, with weights, optimizer
states, gradients and activations on a disk and in DRAM. With `--gpu`, six of them are trained in
bf16 with the defaults of a GPU. `tests/equivalence/family_runs.py` has the comparison. `spread` is
the same difference between plain transformers and itself in fp64: what rounding alone does.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import transformers

from bench import certificate
from tests.equivalence.family_runs import GPU_FAMILIES, Case, compare, gpu_case
from tests.support.family_models import FAMILIES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="FAMILY")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    families = {
        name: {kind: run(name, case) for kind, case in _cases(name, args.gpu).items()}
        for name in args.only or (GPU_FAMILIES if args.gpu else FAMILIES)
    }
    if args.save:
        what = "family_runs_bf16" if args.gpu else "family_runs_fp32"
        path = certificate.save(
            what, {"transformers": transformers.__version__, "steps": 20, "families": families}
        )
        sys.stdout.write(f"{path}\n")


def run(name: str, case: Case) -> dict[str, Any]:
    """Return the differences of one run, or the error that it ends with."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = asdict(compare(case, Path(folder)))
        except Exception as problem:
            # A family that is refused, for example; the others are still of interest.
            text = " ".join(str(problem).replace(folder, "").split())
            found = {"error": f"{type(problem).__name__}: {text}"}
    sys.stdout.write(f"{name}, {'packed' if case.packed else 'unpacked'}: {found}\n")
    sys.stdout.flush()
    return found


def _cases(name: str, gpu: bool) -> dict[str, Case]:
    if gpu:
        return {"packed": gpu_case(name)}
    return {"packed": Case(FAMILIES[name], True), "unpacked": Case(FAMILIES[name], False)}


if __name__ == "__main__":
    main()
