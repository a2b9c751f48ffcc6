"""Train a step with `PenstockTrainer`, from a file of its arguments: a command for fuzzed inputs.

The file has the fields of `PenstockConfig` and arguments of transformers' TrainingArguments.
"""

from __future__ import annotations

import json
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

TRAINER = "trainer"
"""Name of the command, which is none of Penstock's."""


def write_trainer(path: Path) -> None:
    """Write right arguments."""
    penstock = {
        "hbm": "64MiB", "dram": "64MiB", "cxl": "auto", "nvme": [], "moments": "fp32",
        "context": 48, "dtype": "fp32", "micro_batch": 2, "pack": False, "freeze": [],
        "on_nonfinite": "raise", "deterministic": True, "self_check": False, "show_plan": False,
        "engine": {"sweep_threads": 1},
    }  # fmt: skip
    arguments = {
        "per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "max_steps": 1,
        "learning_rate": 3e-3, "weight_decay": 0.1, "adam_beta1": 0.9, "adam_epsilon": 1e-8,
        "max_grad_norm": 0.5, "label_smoothing_factor": 0.1, "neftune_noise_alpha": 1.0,
        "optim": "adamw_torch", "lr_scheduler_type": "cosine", "seed": 7,
    }  # fmt: skip
    path.write_text(json.dumps({"penstock": penstock, "arguments": arguments}, indent=1))


def run_trainer(path: Path) -> int:
    """Train a step and return the exit code that a command would have.

    1 with a message for an error of Penstock, 2 for arguments that are wrong without Penstock, too,
    and 70 with a traceback for any other exception.
    """
    from penstock.errors import PenstockError
    from penstock.integrations import PenstockConfig, PenstockTrainer

    try:
        fields = json.loads(path.read_text())
        config = PenstockConfig(**fields["penstock"])
        arguments = dict(fields["arguments"])
    except PenstockError as problem:
        return _refused(problem)
    except Exception:
        return 2  # no JSON, or a keyword that Python refuses
    try:
        _train(PenstockTrainer, arguments, path.parent, penstock=config)
    except PenstockError as problem:
        return _refused(problem)
    except Exception:
        if _is_wrong_anyway(arguments, path.parent):
            return 2
        traceback.print_exc()
        return 70
    return 0


def _refused(problem: Exception) -> int:
    print(f"error: trainer.json: {problem}", file=sys.stderr)
    return 1


def _is_wrong_anyway(arguments: dict[str, Any], folder: Path) -> bool:
    from transformers import Trainer

    try:
        _train(Trainer, arguments, folder)
    except Exception:
        return True
    return False


def _train(kind: Any, arguments: dict[str, Any], folder: Path, **more: Any) -> None:
    import transformers

    from tests.support.trainers import examples, pad, tiny_model

    with tempfile.TemporaryDirectory(dir=folder) as out:
        always = {"output_dir": out, "report_to": [], "use_cpu": True, "disable_tqdm": True}
        args = transformers.TrainingArguments(**{**arguments, **always, "save_strategy": "no"})
        kind(tiny_model(), args, pad, examples(8), **more).train()
