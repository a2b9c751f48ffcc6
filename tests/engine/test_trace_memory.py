"""Traced working memory equals what the same parts really allocate, on a CPU."""

from typing import Any

import pytest
import torch
import transformers

from penstock.engine.device import CpuDevice
from penstock.engine.step_parts import EmbeddingForward, LayerForward, step_parts
from penstock.engine.trace_memory import trace_working_memory
from penstock.model.meta_model import build_model
from penstock.model.split import SplitModel
from penstock.model.storage_counter import StorageCounter
from penstock.plan.working_memory import KEPT_GAPS, WorkingMemory
from penstock.plan.workload import Workload
from tests.support.engines import inventory, tiny_config, workload
from tests.support.samples import sample

SMALL = {
    "vocab_size": 331, "hidden_size": 64, "intermediate_size": 88, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "pad_token_id": 0,
}  # fmt: skip

CONFIGS: dict[str, Any] = {
    family: (lambda family=family, **changes: tiny_config(family, **changes))
    for family in ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "mistral", "olmo2", "phi3",
                   "gpt_neox", "gpt2", "bloom", "gptj")
} | {
    # ALiBi: its mask has an entry for each head and pair of tokens.
    "falcon": lambda: tiny_config("falcon", alibi=True, multi_query=False),
    "granite": lambda: transformers.GraniteConfig(**SMALL, logits_scaling=8.0),
    "stablelm": lambda: transformers.StableLmConfig(**SMALL),
    "cohere": lambda: transformers.CohereConfig(**SMALL),
    "starcoder2": lambda: transformers.Starcoder2Config(**SMALL),
    "smollm3": lambda: transformers.SmolLM3Config(**SMALL),
}  # fmt: skip


def really_allocated(
    config: Any, work: Workload
) -> tuple[dict[tuple[str, str], int], int, dict[str, int]]:
    """Run every part with real tensors.

    Returns peaks by name and phase, the bytes of arguments, and by layer what forward saves.
    """
    found, cpu = inventory(config), torch.device("cpu")
    bare = build_model(config, torch.bfloat16, cpu, own_attention=found.own_attention)
    noise = work.numerics.neftune_noise_alpha
    model = SplitModel(bare, found, mlp_tile=work.numerics.mlp_tile, noise_alpha=noise)
    peaks: dict[tuple[str, str], int] = {}
    kept, saved = 0, {}
    for part in step_parts(model, model.inventory, work, CpuDevice()):
        part.prepare()
        with StorageCounter() as counter:
            part.run()
        key, left, peak = (part.name, part.phase), counter.live(), counter.peak
        if isinstance(part, EmbeddingForward):
            kept, peak = left, peak - left
        elif type(part) is LayerForward:
            saved[part.name] = max(saved.get(part.name, 0), left)
        peaks[key] = max(peaks.get(key, 0), peak)
        part.release()
    return peaks, kept, saved


def by_phase(memory: WorkingMemory) -> dict[tuple[str, str], int]:
    forward = {(part.name, "forward"): part.forward for part in memory.parts}
    return forward | {(part.name, "backward"): part.backward for part in memory.parts}


@pytest.mark.parametrize("family", sample(CONFIGS, ("llama", "gemma3", "falcon")))
def test_traced_bytes_equal_allocated_bytes(family: str) -> None:
    config = CONFIGS[family]()
    work = workload(context=21, micro_batch=3, loss_chunk=17, mlp_tile=16)

    traced = trace_working_memory(config, inventory(config), work, on_gpu=False)
    peaks, kept, saved = really_allocated(config, work)

    assert by_phase(traced) == peaks
    assert traced.arguments == kept
    assert {part.name: part.saved for part in traced.layers} == saved
    assert traced.inputs == 3 * 512  # 63 token ids, positions and targets of 8 bytes
    assert traced.origin == "traced"


def test_a_trace_for_a_gpu_adds_the_gaps_of_kept_passes_as_a_rehearsal_does() -> None:
    config = tiny_config("llama")
    given = (config, inventory(config), workload(context=21, micro_batch=3))

    cpu, gpu = (trace_working_memory(*given, on_gpu=on_gpu) for on_gpu in (False, True))

    (on_cpu,), (on_gpu_,) = ({part.saved for part in each.layers} for each in (cpu, gpu))
    assert on_cpu is not None
    assert on_gpu_ is not None
    assert on_gpu_ > KEPT_GAPS > on_cpu


def test_noise_and_smoothed_labels_are_traced() -> None:
    config = tiny_config("llama", hidden_size=128)  # rotary tables are small against it
    plain = workload(context=21, micro_batch=3, loss_chunk=17)
    work = workload(
        context=21, micro_batch=3, loss_chunk=17, neftune_noise_alpha=5.0, label_smoothing=0.1
    )

    traced = trace_working_memory(config, inventory(config), work, on_gpu=False)
    without = trace_working_memory(config, inventory(config), plain, on_gpu=False)

    assert by_phase(traced) == really_allocated(config, work)[0]
    assert traced.parts[0].forward > without.parts[0].forward
    assert traced.inputs == without.inputs + 512  # a scale of 4 bytes for each token


def test_a_real_run_through_the_engine_needs_no_more_than_traced() -> None:
    """The parts of a step stand for the whole step: an engine's step is within their peak."""
    from tests.support.engines import batches, make_engine, make_plan_of

    config, work = tiny_config("llama"), workload(context=32, micro_batch=2, batch=4)
    model = inventory(config)
    traced = trace_working_memory(config, model, work, on_gpu=False)
    engine = make_engine(config, make_plan_of(model, work, "hhhh"), model, None)
    (batch,) = batches(1, work, config.vocab_size)
    with engine, StorageCounter() as counter:
        engine.forward_backward(batch)

    budget = traced.peak + work.micro_batches * (traced.inputs + traced.arguments)
    # The step also makes copies of the batch and its labels on this device, and 16-bit gradients.
    assert 0.5 * traced.largest.peak < counter.peak < budget + 64 * 1024


def test_compiled_layers_need_less_than_eager_ones() -> None:
    config = tiny_config(
        "llama", hidden_size=256, intermediate_size=1024, num_attention_heads=4,
        max_position_embeddings=256,
    )  # fmt: skip
    model = inventory(config)
    eager = trace_working_memory(config, model, workload(context=256), on_gpu=True)
    work = workload(context=256, compiled=True, attention="varlen")
    compiled = trace_working_memory(config, model, work, on_gpu=True)

    layer, fused = eager.parts[1], compiled.parts[1]
    assert 0.3 * layer.backward < fused.backward < layer.backward
    assert 0.3 * layer.forward < fused.forward < layer.forward


def test_position_encodings_that_look_at_positions_are_traced() -> None:
    factors = [1.0] * 4
    scaling = {"rope_type": "longrope", "long_factor": factors, "short_factor": factors,
               "rope_theta": 10000.0}  # fmt: skip
    config = tiny_config(
        "phi3", rope_parameters=scaling, original_max_position_embeddings=64,
        max_position_embeddings=128,
    )  # fmt: skip

    memory = trace_working_memory(config, inventory(config), workload(), on_gpu=False)

    assert memory.arguments > 0


def test_the_trace_does_not_depend_on_the_number_of_layers() -> None:
    few, many = (tiny_config("llama", num_hidden_layers=n) for n in (2, 9))

    one, other = (
        trace_working_memory(config, inventory(config), workload(), on_gpu=True)
        for config in (few, many)
    )

    assert one == other
