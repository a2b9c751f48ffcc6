"""Engines over tiny models, under plans chosen by hand."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from penstock.engine.device import pick_device
from penstock.engine.engine import Engine, EngineSettings
from penstock.engine.initial_weights import draw_weights, take_weights
from penstock.engine.optimizer import decay_matrices
from penstock.machine.discovery import discover
from penstock.machine.machine import Machine
from penstock.machine.presets import cpu_machine
from penstock.model.inventory import Inventory
from penstock.model.skeleton import build_model
from penstock.model.split import SplitModel
from penstock.model.survey import survey_model
from penstock.plan.budget import Budget, PathBudget, with_paths
from penstock.plan.plan import Plan
from penstock.plan.workload import Numerics, Workload
from penstock.planner.candidate import BlockLocations, Candidate, Location
from penstock.planner.evaluator import PlanEvaluator
from penstock.planner.planner import plan_result
from penstock.units import GiB

FAMILIES = ("llama", "qwen3", "gemma3")

_CONFIGS = {
    "llama": "LlamaConfig",
    "qwen3": "Qwen3Config",
    "gemma3": "Gemma3TextConfig",
    "gemma2": "Gemma2Config",
    "mistral": "MistralConfig",
    "qwen2": "Qwen2Config",
    "olmo2": "Olmo2Config",
    "phi3": "Phi3Config",
    "gpt_neox": "GPTNeoXConfig",
    "gpt2": "GPT2Config",
}

_SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]


def tiny_config(family: str, **changes: Any) -> Any:
    """A model of a few ten thousand parameters."""
    common: dict[str, Any] = {
        "vocab_size": 260, "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    if family in ("gemma2", "gemma3"):
        common |= {"sliding_window": 64, "layer_types": _SLIDING}
    if family == "gemma2":
        common |= {"query_pre_attn_scalar": 8}
    if family == "gpt2":
        common = {k: common[k] for k in ("vocab_size", "tie_word_embeddings", "pad_token_id",
                                         "bos_token_id", "eos_token_id")}  # fmt: skip
        common |= {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128, "resid_pdrop": 0.0,
                   "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # fmt: skip
    return getattr(transformers, _CONFIGS[family])(**(common | changes))


def plain_model(config: Any, dtype: torch.dtype = torch.bfloat16, seed: int = 1) -> Any:
    """The unmodified model, with weights."""
    torch.manual_seed(seed)
    own = copy.deepcopy(config)  # which the engine's model shares with nobody
    return transformers.AutoModelForCausalLM.from_config(own, dtype=dtype)


def inventory(config: Any, freeze: Sequence[str] = ()) -> Inventory:
    with torch.device("meta"):
        body = transformers.AutoModelForCausalLM.from_config(config)
    return survey_model(body, config, name="tiny", freeze=freeze)


def workload(**changes: Any) -> Workload:
    numerics: dict[str, Any] = {"micro_batch": 2, "loss_chunk": 4096, "mlp_tile": 4096}
    numerics |= {"compiled": False, "loss_kernel": "torch", "attention": "sdpa"}
    given = {"context": 16, "batch": 6}
    for name, value in changes.items():
        (numerics if name in numerics else given)[name] = value
    return Workload(numerics=Numerics(**numerics), **given)


def make_plan_of(
    model: Inventory,
    work: Workload,
    locations: str | Sequence[str],
    *,
    disk: Path | None = None,
    rounds: int = 1,
    slots: int = 2,
    ahead: int = 1,
    piece: int = 1 << 26,
    machine: Machine | None = None,
) -> Plan:
    """Return a plan. `locations` holds four letters per block, d, n, h, c or m: where weight,
    state, gradient and input are stored."""
    if machine is None:
        machine = cpu_machine(discover())
    nvme = (PathBudget(path=str(disk), nbytes=GiB),) if disk is not None else ()
    cxl = sum(node.capacity for node in machine.cxl_nodes)
    budget = Budget(hbm=8 * GiB, dram=8 * GiB, cxl=cxl, nvme=nvme)
    machine, _ = with_paths(machine, budget)
    evaluator = PlanEvaluator(model, work, machine, budget, piece_elements=piece, unbounded=True)
    rows = [locations] * len(model.blocks) if isinstance(locations, str) else list(locations)
    chosen = [_spots(model, i, row) for i, row in enumerate(rows)]
    return plan_result(evaluator, Candidate(tuple(chosen), rounds, slots, ahead)).plan


_LETTERS = {
    "d": Location.DRAM,
    "n": Location.NVME,
    "h": Location.HBM,
    "c": Location.CXL,
    "m": Location.MIX,
}


def _spots(model: Inventory, index: int, row: str) -> BlockLocations:
    weight, state, gradient, hidden = (_LETTERS[letter] for letter in row)
    block = model.blocks[index]
    trained = bool(block.parameters(True))
    return BlockLocations(
        weight=weight if block.tensors else None,
        state=state if trained else None,
        gradient=gradient if trained else None,
        input=hidden if block.kind == "layer" else None,
    )


def make_engine(config: Any, plan: Plan, model: Inventory, source: Any, **changes: Any) -> Engine:
    """An engine on the CPU with the weights of `source`, or with its own if there is none."""
    device = pick_device(changes.pop("device", "cpu"))
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[plan.workload.dtype]
    numerics = plan.workload.numerics
    bare = build_model(config, dtype, device.where)
    body = SplitModel(bare, model, mlp_tile=numerics.mlp_tile, compiled=numerics.compiled)
    given: dict[str, Any] = {"optimizer": {"lr": 1e-2}, "grouping": decay_matrices}
    engine = Engine(plan, model, body, device, EngineSettings(**(given | changes)))
    if source is None:
        draw_weights(engine.access, model, body, seed=0)
    else:
        take_weights(engine.access, model, source.state_dict())
    return engine


def batches(count: int, work: Workload, vocabulary: int, seed: int = 5) -> list[Any]:
    """Rows of random tokens, with some labels left out."""
    drawn = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        ids = torch.randint(3, vocabulary, (work.batch, work.context), generator=drawn)
        labels = ids.clone()
        labels[torch.rand(labels.shape, generator=drawn) < 0.2] = -100
        made.append({"input_ids": ids, "labels": labels})
    return made
