"""The arms of DeepSpeed, configured as an experienced user would.

`deepspeed-zero3` follows its documentation. `deepspeed-zero3-tuned` sizes buckets by the model's
layers and pins memory at its exact size. ZeRO-2 keeps 16-bit weights on the GPU. The Infinity arms
pipeline reads and writes, which fails with an assertion if there are fewer than 12 buffers.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from bench.measuring import Batch
from bench.peers.torch_arms import set_one_rank
from bench.peers.work import Step, Work, build_model, ready, weight_of

AIO: dict[str, Any] = {
    "block_size": 8 << 20, "queue_depth": 32, "intra_op_parallelism": 8,
    "single_submit": False, "overlap_events": True, "use_gds": False,
}  # fmt: skip
"""The best settings that DeepSpeed's own tuner found for the disk of the H200 machine."""

BUFFERS = 12
"""Number of optimizer buffers: four states at three stages of the pipeline."""

_LIVE: dict[str, Any] = {}
"""References that keep aio handles and pinned memory alive longer than the engine."""


def base_config(work: Work) -> dict[str, Any]:
    if work.dtype == "bf16":
        precision: dict[str, Any] = {"bf16": {"enabled": True}}
    else:
        # With 2^16 the first steps overflow and are skipped, but would be timed like other steps.
        precision = {"fp16": {"enabled": True, "initial_scale_power": 12}}
    return {
        **precision,
        "train_micro_batch_size_per_gpu": work.batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": work.clip,
        "optimizer": {"type": "AdamW", "params": {**work.adamw, "betas": list(work.betas)}},
        "wall_clock_breakdown": False,
        "steps_per_print": 10**9,
    }


def zero3_config(work: Work, *, tuned: bool) -> dict[str, Any]:
    host = {"device": "cpu", "pin_memory": work.device.type == "cuda"}
    zero: dict[str, Any] = {
        "stage": 3, "overlap_comm": True, "contiguous_gradients": True,
        "offload_param": dict(host), "offload_optimizer": dict(host),
    }  # fmt: skip
    if tuned:
        zero |= buckets(work) | {"sub_group_size": int(4e8)}
    return base_config(work) | {"zero_optimization": zero}


def zero2_config(work: Work) -> dict[str, Any]:
    zero = {"stage": 2, "overlap_comm": True, "contiguous_gradients": True, "reduce_scatter": True,
            "reduce_bucket_size": int(2e8), "allgather_bucket_size": int(2e8),
            "offload_optimizer": {"device": "cpu",
                                  "pin_memory": work.device.type == "cuda"}}  # fmt: skip
    return base_config(work) | {"zero_optimization": zero}


def infinity_config(work: Work, *, weights: bool) -> dict[str, Any]:
    """Return the configuration with the optimizer on disk, and also the weights if `weights`."""
    folder = str(Path(work.scratch).resolve() / "zero-infinity")
    sub_group = int(1e8)
    optimizer = {"device": "nvme", "nvme_path": folder, "buffer_count": BUFFERS,
                 "pipeline_read": True, "pipeline_write": True, "fast_init": True}  # fmt: skip
    param: dict[str, Any] = {"device": "cpu", "pin_memory": work.device.type == "cuda"}
    if weights:
        # A slot must hold any tensor and, with fast_init, a whole sub-group.
        size = max(largest_tensor(work), sub_group) + (1 << 20)
        param = {"device": "nvme", "nvme_path": folder, "buffer_count": slots(work),
                 "buffer_size": size, "max_in_cpu": 0}  # fmt: skip
    zero = {"stage": 3, "overlap_comm": True, "contiguous_gradients": True, **buckets(work),
            "sub_group_size": sub_group, "offload_param": param,
            "offload_optimizer": optimizer}  # fmt: skip
    return base_config(work) | {"zero_optimization": zero, "aio": AIO}


def buckets(work: Work) -> dict[str, Any]:
    """Return buckets that prefetch two layers and keep a layer from recomputation to backward."""
    layer = layer_elements(work)
    return {
        "reduce_bucket_size": int(2e8),
        "stage3_prefetch_bucket_size": 2 * layer,
        "stage3_max_live_parameters": int(1.5e9),
        "stage3_max_reuse_distance": layer + layer // 3,
        "stage3_param_persistence_threshold": int(1e5),
    }


def slots(work: Work) -> int:
    """Return the number of weight slots: the fewest that worked on an H200."""
    return int(work.options.get("slots") or 9)


def layer_elements(work: Work) -> int:
    c = work.config
    head = c.hidden_size // c.num_attention_heads
    attention = c.hidden_size * head * (2 * c.num_attention_heads + 2 * c.num_key_value_heads)
    return int(attention + 3 * c.hidden_size * c.intermediate_size + 2 * c.hidden_size)


def largest_tensor(work: Work) -> int:
    c = work.config
    return int(c.hidden_size * max(c.vocab_size, c.intermediate_size))


@contextlib.contextmanager
def zero3(work: Work) -> Iterator[Step]:
    with started(work, zero3_config(work, tuned=False)) as step:
        yield step


@contextlib.contextmanager
def zero3_tuned(work: Work) -> Iterator[Step]:
    os.environ["DS_PIN_MEMORY_BACKEND"] = "native"
    with started(work, zero3_config(work, tuned=True)) as step:
        empty_host_cache()
        yield step


@contextlib.contextmanager
def zero2(work: Work) -> Iterator[Step]:
    with started(work, zero2_config(work)) as step:
        yield step


@contextlib.contextmanager
def infinity(work: Work) -> Iterator[Step]:
    with started(work, infinity_config(work, weights=True)) as step:
        yield step


@contextlib.contextmanager
def infinity_optimizer(work: Work) -> Iterator[Step]:
    with started(work, infinity_config(work, weights=False)) as step:
        yield step


@contextlib.contextmanager
def started(work: Work, config: dict[str, Any]) -> Iterator[Step]:
    deepspeed = import_deepspeed(work)
    deepspeed.init_distributed(dist_backend="nccl" if work.device.type == "cuda" else "gloo")
    model = zero3_model(deepspeed, work, config)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    _LIVE["engine"] = engine
    around = hidden_to_host(work)

    def step(batch: Batch) -> float:
        ids = batch["input_ids"].to(work.device)
        with around():  # until backward is done; the offloaded activations are released at the end
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
        engine.step()
        if work.device.type == "cuda":
            torch.cuda.synchronize()
        if getattr(engine.optimizer, "overflow", False):
            print("  overflow: the step was skipped", flush=True)
        return float(loss.detach())

    yield step


def zero3_model(deepspeed: Any, work: Work, config: dict[str, Any]) -> Any:
    """Build the model under ZeRO stage 3, which shards each module as it is created."""
    if config["zero_optimization"]["stage"] < 3:
        return build_model(work, work.torch_dtype, work.device)
    # Import before entering: inside, DeepSpeed replaces torch.Tensor, which breaks imported
    # classes.
    family: Any = importlib.import_module("transformers.models.llama.modeling_llama")
    shape = work.config
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = family.LlamaForCausalLM(shape).to(work.torch_dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                parameter.data.copy_(weight_of(name, tuple(parameter.shape), work))
    return ready(model)


def hidden_to_host(work: Work) -> Any:
    """Offload activations (block inputs) to host memory, for the largest batch and context."""
    if work.options.get("activations") != "host":
        return contextlib.nullcontext
    name = "deepspeed.runtime.activation_checkpointing.offload_activations"
    return importlib.import_module(name).CheckpointHiddenStatesOffload


def import_deepspeed(work: Work) -> Any:
    """Import DeepSpeed after setting the variables that it reads when it is imported."""
    set_one_rank()
    os.environ.setdefault("DS_SKIP_CUDA_CHECK", "1")
    if work.device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if "TORCH_CUDA_ARCH_LIST" in os.environ:  # it cannot parse the "a" of 9.0a
        os.environ["TORCH_CUDA_ARCH_LIST"] = os.environ["TORCH_CUDA_ARCH_LIST"].replace("a", "")
    use_libaio()
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
    importlib.import_module("setuptools")  # provides distutils, which its builder imports
    return importlib.import_module("deepspeed")


def kernels_of(arm: str) -> tuple[str, ...]:
    if "infinity" in arm:
        return ("CPUAdamBuilder", "PinMemoryBuilder", "AsyncIOBuilder")
    return ("CPUAdamBuilder", "PinMemoryBuilder") if "tuned" in arm else ("CPUAdamBuilder",)


def build_kernels(arm: str, work: Work) -> None:
    """Compile the kernels that an arm compiles at first use, so that its startup is not charged."""
    import_deepspeed(work)
    accelerator = importlib.import_module("deepspeed.accelerator").get_accelerator()
    for name in kernels_of(arm):
        try:
            accelerator.create_op_builder(name).load(verbose=False)
            print(f"{name}: there", flush=True)
        except Exception as problem:  # the arm that needs the kernel reports the failure again
            print(f"{name}: {type(problem).__name__}: {problem}"[:400], flush=True)


def use_libaio() -> None:
    """Make libaio, as unpacked by fetch.py, visible to the compiler and to the loader."""
    for folder in map(Path, sys.path):
        library = folder / "libaio/lib/libaio.so.1"
        if library.exists():
            for name, kind in (("CPATH", "include"), ("LIBRARY_PATH", "lib")):
                here = str((folder / "libaio" / kind).resolve())
                os.environ[name] = ":".join(filter(None, (here, os.environ.get(name, ""))))
            _LIVE["libaio"] = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
            return


def empty_host_cache() -> None:
    """Release memory that startup pinned and freed."""
    accelerator: Any = torch.accelerator
    if accelerator.is_available() and hasattr(accelerator, "empty_host_cache"):
        accelerator.empty_host_cache()
