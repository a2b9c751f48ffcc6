"""Tiny models, plans with a placement chosen by hand, and engines for both."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

from penstock.engine.device import pick_device
from penstock.engine.engine import Engine, EngineSettings
from penstock.engine.initial_weights import draw_weights, set_weights
from penstock.engine.optimizer import decay_matrices
from penstock.machine.discovery import discover
from penstock.machine.machine import Machine
from penstock.machine.presets import cpu_machine
from penstock.model.inventory import Inventory
from penstock.model.meta_model import build_model, weight_dtype, without_parameters
from penstock.model.self_check import check_model
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
    "olmo": "OlmoConfig",
    "olmo2": "Olmo2Config",
    "phi3": "Phi3Config",
    "gpt_neox": "GPTNeoXConfig",
    "gpt2": "GPT2Config",
    "bloom": "BloomConfig",
    "falcon": "FalconConfig",
    "gptj": "GPTJConfig",
    "olmoe": "OlmoeConfig",
    "qwen3_moe": "Qwen3MoeConfig",
    "mixtral": "MixtralConfig",
    "gpt_oss": "GptOssConfig",
    "deepseek_v3": "DeepseekV3Config",
    "glm4_moe": "Glm4MoeConfig",
}

OWN_ATTENTION = ("bloom", "falcon", "gptj")
"""Families whose layers compute attention with their own code."""

EXPERTS: dict[str, dict[str, Any]] = {
    "olmoe": {"num_experts": 8, "intermediate_size": 24},
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 24, "decoder_sparse_step": 2},
    "mixtral": {"num_local_experts": 4, "intermediate_size": 24},
    "gpt_oss": {"num_local_experts": 4, "intermediate_size": 24, "sliding_window": 6},
    "deepseek_v3": {
        "n_routed_experts": 8, "moe_intermediate_size": 24, "n_group": 4, "topk_group": 2,
        "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 4, "v_head_dim": 8, "num_key_value_heads": 4, "n_shared_experts": 1,
    },
    "glm4_moe": {
        "n_routed_experts": 8, "moe_intermediate_size": 24, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1, "n_shared_experts": 1,
    },
}  # fmt: skip
"""Families of mixtures of experts. Qwen 3, DeepSeek and GLM have dense layers as well, and DeepSeek
and GLM have shared experts."""

_SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]


def tiny_config(family: str, **changes: Any) -> Any:
    """Return the configuration of a model with a few ten thousand parameters."""
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
    if family in ("bloom", "falcon"):
        common |= {"hidden_dropout": 0.0, "attention_dropout": 0.0}
        del common["head_dim"]
    if family in ("gpt2", "gptj"):
        common = {k: common[k] for k in ("vocab_size", "tie_word_embeddings", "pad_token_id",
                                         "bos_token_id", "eos_token_id")}  # fmt: skip
        common |= {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128, "resid_pdrop": 0.0,
                   "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # fmt: skip
    if family == "gptj":
        common |= {"rotary_dim": 4}
    if family in EXPERTS:
        common |= {"num_experts_per_tok": 2, **EXPERTS[family]}
    if family == "deepseek_v3":
        del common["head_dim"]  # it is that of rotary positions
    return getattr(transformers, _CONFIGS[family])(**(common | changes))


def plain_model(config: Any, dtype: torch.dtype = torch.bfloat16, seed: int = 1) -> Any:
    """Return the unmodified model with random weights."""
    torch.manual_seed(seed)
    # A copy, so that this model shares no configuration object with the engine's model.
    separate = copy.deepcopy(config)
    return transformers.AutoModelForCausalLM.from_config(separate, dtype=dtype)


_unneeded: dict[str, tuple[str, ...]] = {}
_inventories: dict[tuple[type, str, tuple[str, ...]], Inventory] = {}
"""By class and contents of the config, and by what is frozen: many tests survey the same model."""


def inventory(config: Any, freeze: Sequence[str] = ()) -> Inventory:
    """Return the inventory of a model, with the parameters that match `freeze` frozen."""
    key = type(config), config.to_json_string(use_diff=False), tuple(freeze)
    if key not in _inventories:
        with torch.device("meta"), without_parameters():
            body = transformers.AutoModelForCausalLM.from_config(config)
        found = survey_model(body, config, name="tiny", freeze=freeze)
        paths = _unneeded_outputs(body, found)
        blocks = tuple(replace(b, unneeded=paths) if b.kind == "layer" else b for b in found.blocks)
        own = config.model_type in OWN_ATTENTION
        _inventories[key] = replace(found, blocks=blocks, own_attention=own)
    return _inventories[key]


def _unneeded_outputs(body: Any, found: Inventory) -> tuple[str, ...]:
    """Return what a recomputed layer need not compute; looked up once for each type of model."""
    kind = body.config.model_type
    if kind not in _unneeded:
        _unneeded[kind] = check_model(body, found).layers[0].unneeded
    return _unneeded[kind]


def workload(**changes: Any) -> Workload:
    """Return a small workload. Keyword arguments override its fields and those of its numerics."""
    numerics: dict[str, Any] = {"micro_batch": 2, "loss_chunk": 4096, "mlp_tile": 4096}
    numerics |= {"compiled": False, "loss_kernel": "torch", "attention": "sdpa"}
    numerics |= {"deterministic": True, "head_sum": "micro", "forward": "training"}
    fields = {"context": 16, "batch": 6}
    for name, value in changes.items():
        (numerics if name in Numerics.__dataclass_fields__ else fields)[name] = value
    return Workload(numerics=Numerics(**numerics), **fields)


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
    kept: Sequence[int] = (),
    attention: str = "",
    gpu_swept: Sequence[int] = (),
    gpu_piece: int | None = None,
    interleaved: bool = False,
    late: bool = False,
    late_on_nvme: Sequence[int] = (),
    machine: Machine | None = None,
) -> Plan:
    """Return a plan with the given placement.

    `locations` has four letters for each block, or four for all blocks: where weight, state,
    gradient and activation are stored. d is DRAM, n NVMe, h HBM, c CXL and m a mix of DRAM and CXL.
    A fifth letter says where the frozen weights of a block are that also has trained ones. `kept`
    has the number of micro-batches that each layer keeps, and `attention` a letter for each layer:
    where the results of its attention are saved, or - if they are computed again. `gpu_swept` has
    the numbers of blocks in DRAM whose states pass through HBM, in pieces of `gpu_piece` elements.
    With `interleaved`, sweeps of blocks in DRAM run between the pieces of blocks on NVMe. With
    `late`, the moments of blocks in DRAM are updated in backward. `late_on_nvme` has the numbers of
    blocks with moments on NVMe that are updated in backward.
    """
    if machine is None:
        machine = cpu_machine(discover())
    nvme = (PathBudget(path=str(disk), nbytes=GiB),) if disk is not None else ()
    cxl = sum(node.capacity for node in machine.cxl_nodes)
    budget = Budget(hbm=8 * GiB, dram=8 * GiB, cxl=cxl, nvme=nvme)
    machine, _ = with_paths(machine, budget)
    pieces: dict[str, int] = {"piece_elements": piece}
    if gpu_piece is not None:
        pieces["gpu_piece_elements"] = gpu_piece
    evaluator = PlanEvaluator(model, work, machine, budget, unbounded=True, **pieces)
    rows = [locations] * len(model.blocks) if isinstance(locations, str) else list(locations)
    blocks = [_locations_of(model, i, row) for i, row in enumerate(rows)]
    by_block = (0, *kept, 0) if kept else ()
    swept = frozenset(i for i in gpu_swept if model.blocks[i].parameters(True))
    saved = (None, *(_LETTERS.get(letter) for letter in attention), None) if attention else ()
    on_nvme = frozenset(i for i in late_on_nvme if blocks[i].state is Location.NVME)
    candidate = Candidate(
        tuple(blocks), rounds, slots, ahead, by_block, swept, saved, interleaved, late, on_nvme
    )
    return plan_result(evaluator, candidate).plan


_LETTERS = {
    "d": Location.DRAM,
    "n": Location.NVME,
    "h": Location.HBM,
    "c": Location.CXL,
    "m": Location.MIX,
}


def _locations_of(model: Inventory, index: int, row: str) -> BlockLocations:
    weight, state, gradient, hidden, *frozen = (_LETTERS[letter] for letter in row)
    block = model.blocks[index]
    trained = bool(block.parameters(True))
    both = trained and bool(block.parameters(False))
    return BlockLocations(
        weight=weight if block.tensors else None,
        state=state if trained else None,
        gradient=gradient if trained else None,
        activation=hidden if block.kind == "layer" else None,
        frozen=frozen[0] if frozen and both else None,
    )


def make_engine(config: Any, plan: Plan, model: Inventory, source: Any, **changes: Any) -> Engine:
    """Return an engine with the weights of `source`, or with random ones if it is None.

    It runs on the CPU unless `device` names another device.
    """
    device = pick_device(changes.pop("device", "cpu"))
    ranks = changes.pop("ranks", None)
    numerics = plan.workload.numerics
    bare = build_model(
        config, weight_dtype(plan.workload.dtype), device.torch_device,
        own_attention=model.own_attention,
    )  # fmt: skip
    split_model = SplitModel(
        bare, model, mlp_tile=numerics.mlp_tile, compiled=numerics.compiled,
        deterministic=numerics.deterministic, noise_alpha=numerics.neftune_noise_alpha,
        recomputes=True,
    )  # fmt: skip
    settings: dict[str, Any] = {"optimizer": {"lr": 1e-2}, "grouping": decay_matrices}
    given = EngineSettings(**(settings | changes))
    engine = Engine(plan, model, split_model, device, given, ranks)
    if source is None:
        draw_weights(engine.access, model, split_model, seed=0)
    else:
        set_weights(engine.access, model, source.state_dict())
    return engine


def batches(count: int, work: Workload, vocabulary: int, seed: int = 5) -> list[Any]:
    """Return batches of random tokens, with a fifth of the labels ignored (-100)."""
    drawn = torch.Generator().manual_seed(seed)
    result = []
    for _ in range(count):
        ids = torch.randint(3, vocabulary, (work.batch, work.context), generator=drawn)
        labels = ids.clone()
        labels[torch.rand(labels.shape, generator=drawn) < 0.2] = -100
        result.append({"input_ids": ids, "labels": labels})
    return result
