"""Scripts of Trainer and TRL with the lines changed that make the model."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

import penstock as ps
from tests.support.engines import tiny_config

STEPS = 10

# transformers and TRL warn of their own arguments and of a machine without a GPU.
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture
def trl() -> Any:
    """Return TRL, which `make` does not install: with its requirements, it is large."""
    pytest.importorskip("datasets", reason="datasets is not installed (pip install datasets)")
    return pytest.importorskip("trl", reason="TRL is not installed (pip install trl)")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny model and a tokenizer of words, in a directory."""
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(1)
    config = tiny_config("llama")
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    words = ["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(257))]
    ids = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>",
        unk_token="w0",
    ).save_pretrained(path)  # fmt: skip
    return path


def sentences(count: int, *names: str) -> Any:
    import datasets

    draw = random.Random(0)

    def words() -> str:
        return " ".join(f"w{draw.randint(1, 250)}" for _ in range(draw.randint(3, 8)))

    return datasets.Dataset.from_list([{name: words() for name in names} for _ in range(count)])


def common(out: Path) -> dict[str, Any]:
    return {
        "output_dir": str(out), "per_device_train_batch_size": 4, "max_steps": STEPS,
        "learning_rate": 1e-3, "logging_steps": 1, "report_to": [], "seed": 7,
        "save_strategy": "no", "bf16": False, "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }  # fmt: skip


def stream(model: Any) -> tuple[Any, dict[str, Any]]:
    """Return what the script passes to the trainer in place of the model."""
    model, optimizer = ps.stream(
        model, tokens=512, budget={"hbm": "64MiB", "dram": "64MiB"}, device="cpu",
        self_check=False, lr=1e-3, weight_decay=0.0, betas=(0.9, 0.999),
    )  # fmt: skip
    return model, {"optimizers": (optimizer, None)}


def run(trainer: Any, model: Any, *names: str) -> list[tuple[float, ...]]:
    trainer.train()
    if hasattr(model, "close"):
        model.close()
    history = trainer.state.log_history
    return [tuple(entry.get(n, 0.0) for n in names) for entry in history if "loss" in entry]


def assert_equal(found: list[tuple[float, ...]], expected: list[tuple[float, ...]]) -> None:
    assert len(expected) == STEPS
    for step, pair in enumerate(zip(found, expected, strict=True)):
        # Losses of GRPO are sums that nearly cancel.
        assert pair[0] == pytest.approx(pair[1], rel=1e-5, abs=2e-7), step


def test_dpo(trl: Any, folder: Path, tmp_path: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    data = sentences(40, "prompt", "chosen", "rejected")
    logs = []
    for streamed in (True, False):
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        options: dict[str, Any] = {}
        if streamed:
            model, options = stream(model)
        trainer = trl.DPOTrainer(
            model=model, args=trl.DPOConfig(**common(tmp_path), max_grad_norm=0.5),
            train_dataset=data, processing_class=tokenizer, **options,
        )  # fmt: skip
        logs.append(run(trainer, model, "loss", "grad_norm", "logps/chosen"))
    assert_equal(*logs)


def test_dpo_with_an_adapter_and_no_reference_model(trl: Any, folder: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    data = sentences(40, "prompt", "chosen", "rejected")
    logs = []
    for streamed in (True, False):
        base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        torch.manual_seed(4)
        model: Any = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear"))
        options: dict[str, Any] = {}
        if streamed:
            model, options = stream(model)
        trainer = trl.DPOTrainer(
            model=model, args=trl.DPOConfig(**common(tmp_path), max_grad_norm=0.5),
            train_dataset=data, processing_class=tokenizer, **options,
        )  # fmt: skip
        logs.append(run(trainer, model, "loss", "grad_norm", "logps/chosen", "rewards/margins"))
    assert_equal(*logs)


def test_reward(trl: Any, folder: Path, tmp_path: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    data = sentences(40, "chosen", "rejected")
    logs = []
    for streamed in (True, False):
        torch.manual_seed(2)  # the new head
        model: Any = transformers.AutoModelForSequenceClassification.from_pretrained(
            folder, dtype=torch.float32, num_labels=1
        )
        options: dict[str, Any] = {}
        if streamed:
            model, options = stream(model)
        trainer = trl.RewardTrainer(
            model=model,
            args=trl.RewardConfig(**common(tmp_path), gradient_accumulation_steps=2),
            train_dataset=data, processing_class=tokenizer, **options,
        )  # fmt: skip
        logs.append(run(trainer, model, "loss", "grad_norm", "min_reward", "max_reward"))
    assert_equal(*logs)


def test_grpo(trl: Any, folder: Path, tmp_path: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")
    data = sentences(40, "prompt")
    logs = []

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(sum(map(ord, text)) % 17) for text in completions]

    for streamed in (True, False):
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        options: dict[str, Any] = {}
        if streamed:
            model, options = stream(model)
        args = trl.GRPOConfig(
            **common(tmp_path), num_generations=4, max_completion_length=5, beta=0.04,
            num_iterations=2,
        )  # fmt: skip
        trainer = trl.GRPOTrainer(
            model=model, reward_funcs=reward, args=args, train_dataset=data,
            processing_class=tokenizer, **options,
        )  # fmt: skip
        logs.append(run(trainer, model, "loss", "grad_norm", "kl"))
    assert_equal(*logs)


def test_trainer_saves_and_resumes(folder: Path, tmp_path: Path) -> None:
    ids = torch.randint(3, 260, (64, 12), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row.tolist(), "labels": row.tolist()} for row in ids]
    logs, weights = [], []
    for name, resume in (("streamed", None), ("plain", None), ("streamed", "checkpoint-5")):
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        options: dict[str, Any] = {}
        if name == "streamed":
            model, options = stream(model)
        args = transformers.TrainingArguments(
            **(common(tmp_path / name) | {"save_strategy": "steps", "save_steps": 5}),
            eval_strategy="steps", eval_steps=5, gradient_accumulation_steps=2,
        )  # fmt: skip
        trainer = transformers.Trainer(
            model=model, args=args, train_dataset=data, eval_dataset=data[:8], **options
        )
        trainer.train(resume_from_checkpoint=resume and str(tmp_path / name / resume))
        weights.append({n: t.clone() for n, t in model.state_dict().items()})
        history = trainer.state.log_history
        logs.append([(e["loss"], e["grad_norm"]) for e in history if "loss" in e])
        if name == "streamed":
            model.close()
    assert_equal(logs[0], logs[1])
    assert all(torch.equal(weights[2][n], weights[0][n]) for n in weights[0])


def test_trainer_without_the_optimizer_says_what_to_pass(folder: Path, tmp_path: Path) -> None:
    from penstock.errors import EngineError

    model, _ = stream(transformers.AutoModelForCausalLM.from_pretrained(folder))
    data = [{"input_ids": [3, 4, 5], "labels": [3, 4, 5]}] * 4
    args = transformers.TrainingArguments(**common(tmp_path))
    with model, pytest.raises(EngineError, match=r"optimizers=\(optimizer, None\)"):
        transformers.Trainer(model=model, args=args, train_dataset=data).train()
