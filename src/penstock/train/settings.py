"""Everything a run can be told. Room: show.

The command's flags and the keys of run.yaml are the fields of RunSettings and nothing else.
"""

# ruff: noqa: RUF009 - told() is dataclasses.field()

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field
from typing import Any, Literal

from penstock.records import Json
from penstock.roles import Dtype, Moments
from penstock.train.errors import SettingsError
from penstock.train.intervals import parse_interval

Schedule = Literal["cosine", "linear", "constant"]


def told(help_: str, default: Any = MISSING) -> Any:
    """A field whose words are the flag's help."""
    if isinstance(default, Mapping):
        return field(default_factory=lambda: dict(default), metadata={"help": help_})
    return field(default=default, metadata={"help": help_})


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSettings:
    """One run, as the user asks for it."""

    model: str = told("A directory, or a Hugging Face id.")
    data: tuple[str, ...] = told("Files, directories or dataset ids; may be given again.")
    out: str = told("Where checkpoints, metrics and the model go.")
    context: int = told("Tokens in a sequence.", 4096)
    batch: int = told("Sequences per optimizer step.", 32)
    epochs: float | None = told("Passes over the data; 1 unless --steps is given.", None)
    steps: int | None = told("Optimizer steps, instead of --epochs.", None)
    micro_batch: str = told("Sequences computed at once.", "auto")
    hbm: str = told("Of the GPU: a size such as 22GiB, or auto.", "auto")
    dram: str = told("Of memory with CPUs.", "auto")
    cxl: str = told("Of CXL memory.", "auto")
    nvme: tuple[str, ...] = told("PATH:SIZE; may be given again.", ())
    moments: Moments = told("fp32 is exact; bf16 and int8 take less room.", "fp32")
    plan: str | None = told("A plan made by `penstock plan -o`, instead of budgets.", None)
    lr: float = told("Learning rate at its highest.", 1e-5)
    schedule: Schedule = told("How the learning rate falls.", "cosine")
    warmup: float = told("Below 1 a share of the steps, else a number of steps.", 0.03)
    betas: tuple[float, ...] = told("Of AdamW.", (0.9, 0.95))
    weight_decay: float = told("Of matrices; norms and biases are not decayed.", 0.1)
    clip: float = told("Largest gradient norm; 0 for none.", 1.0)
    dtype: Dtype = told("What is computed in.", "bf16")
    freeze: tuple[str, ...] = told("A pattern of tensors not trained; may be given again.", ())
    model_config: Json = told("KEY=VALUE of the model's config; may be given again.", {})
    init: Literal["pretrained", "random"] = told("Where weights come from.", "pretrained")
    revision: str | None = told("Of the model on the hub.", None)
    trust_remote_code: bool = told("Run the model's own code.", False)
    eval_data: tuple[str, ...] = told("Held-out data; may be given again.", ())
    eval_split: float | None = told("Share of the data to hold out.", None)
    eval_every: int | None = told("Steps between evaluations; always at both ends.", None)
    sample_prompts: str | None = told("JSON lines, answered at each evaluation.", None)
    sample_new: int = told("Tokens of such an answer at most.", 64)
    overlong: Literal["truncate", "drop", "split"] = told("What to do with documents longer than "
                                                          "the context.", "truncate")  # fmt: skip
    skip_bad_lines: bool = told("Leave out lines that are no examples.", False)
    cache: str | None = told("Where tokens are kept.", None)
    save_every: str = told("A time such as 30min, or a number of steps.", "30min")
    keep: int = told("Checkpoints that are kept; the newest has the optimizer's state.", 2)
    save_weights_only: bool = told("Checkpoints without optimizer state: no resume.", False)
    on_nonfinite: Literal["raise", "skip"] = told("A loss that is NaN stops the run, or the step "
                                                  "is left out.", "raise")  # fmt: skip
    deterministic: bool = told("Only kernels that give the same bits every time.", False)
    seed: int = told("Of order, dropout and random weights.", 0)
    log: tuple[str, ...] = told("tensorboard, wandb, or both with a comma.", ())

    def __post_init__(self) -> None:
        _check(self)

    @property
    def micro_batch_size(self) -> int | None:
        return None if self.micro_batch == "auto" else int(self.micro_batch)

    @property
    def evaluates(self) -> bool:
        return bool(self.eval_data) or self.eval_split is not None


CHANGES_BITS = (
    *("context", "batch", "moments", "lr", "schedule", "warmup", "betas", "weight_decay", "clip"),
    *("dtype", "freeze", "model_config", "deterministic", "seed", "overlong", "on_nonfinite"),
)
"""Settings that can change the result; a resume tells those that are not what they were."""


def _check(told: RunSettings) -> None:
    least = {"context": 2, "batch": 1, "keep": 1, "seed": 0, "sample_new": 1}
    for name, value in least.items():
        _refuse(name, getattr(told, name) < value, f"must be {value} or more", getattr(told, name))
    for name in ("steps", "epochs", "eval_every"):
        value = getattr(told, name)
        _refuse(name, value is not None and value <= 0, "must be above 0", value)
    for name in ("lr", "warmup", "weight_decay", "clip"):
        _refuse(name, getattr(told, name) < 0, "must be 0 or more", getattr(told, name))
    both = told.steps is not None and told.epochs is not None
    _refuse("steps", both, "and epochs cannot both be given", told.steps)
    both = bool(told.eval_data) and told.eval_split is not None
    _refuse("eval_split", both, "and eval_data cannot both be given", told.eval_split)
    pair = len(told.betas) == 2 and all(0 <= beta < 1 for beta in told.betas)
    _refuse("betas", not pair, "must be two numbers from 0 to below 1", list(told.betas))
    _refuse("data", not told.data, "must name at least one file", [])
    number = told.micro_batch.isascii() and told.micro_batch.isdigit() and int(told.micro_batch) > 0
    known = told.micro_batch == "auto" or number
    _refuse("micro_batch", not known, "must be auto or a number of 1 or more", told.micro_batch)
    known = set(told.log) <= {"tensorboard", "wandb"}
    _refuse("log", not known, "may be tensorboard and wandb", list(told.log))
    if not isinstance(told.model_config, Mapping):
        raise SettingsError("model_config", f"must be names and values, got {told.model_config!r}")
    parse_interval(told.save_every)


def _refuse(name: str, wrong: bool, rule: str, got: object) -> None:
    if wrong:
        raise SettingsError(name, f"{rule}, got {got}")
