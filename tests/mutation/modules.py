"""The modules that decide results, and the tests that may notice a change in them."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]


def _in(package: str, names: str) -> list[str]:
    folder = f"src/penstock/{package}".removesuffix("/")
    return [f"{folder}/{name}.py" for name in names.split()]


MODULES = (
    *_in("engine", "allocate batches bounded_executor compute determinism engine gradients"),
    *_in(
        "engine",
        "attention_results hidden_states initial_weights loss optimizer pending_update program",
    ),
    *_in("engine", "result_record runner spans state_io state_view step_state tensor_access"),
    *_in("engine", "ticket_board tier_memory transfer"),
    *_in("engine", "caller_passes dequantized_weights gradient_buffers held_blocks memory_source"),
    *_in("engine", "rank_agreement rank_exchange restore step_parts tensor_updates"),
    *_in("engine", "attention_results expert_load weight_streamer"),
    *_in("model", "attention attention_launch checkpoint_names document_attention inventory"),
    *_in("model", "mlp_tiles parameter_flow quantization split survey varlen_attention"),
    *_in("model", "adapters copy_check embedding_noise experts freeze live_model quantize rotary"),
    *_in("model", "router_loss"),
    *_in("model", "attention_replay attention_sizes"),
    *_in("model", "parameter_adapters saved_names tensor_layout text_stack weight_conversion"),
    *_in("", "lora_options packed_weights"),
    *_in("optim", "formats norms optimizers reference rules sweep tensor_rules"),
    *_in("plan", "activation_overlay budget buffers build_schedule cuda_allocator lifetimes"),
    *_in("plan", "memory_interpolation packing placement placement_index plan schedule staging"),
    *_in("plan", "seats traffic update_workspace working_memory working_memory_estimate workload"),
    *_in(
        "planner", "candidate drives evaluator kept_layers planner saved_attention staging_pieces"
    ),
    *_in("checkpoint", "disk manifest model_files model_weights reader run_directory"),
    *_in("checkpoint", "safetensors_header training_state writer"),
    *_in("checkpoint", "adapter_files assemble checksums merged_weights plain_tensors"),
    *_in("checkpoint", "shard_template verify"),
    *_in("train", "checkpoints inputs learning_rate loop plan_choice resume session"),
    *_in("train", "best_model merge"),
    *_in("data", "batches chat dataset encode examples packing shuffle sources token_cache"),
    *_in("data", "tokenizer"),
    *_in("autograd", "default_positions inputs layers_function model model_masks module_modes"),
    *_in("autograd", "optimizer parameters peft_wrapper stream towers"),
    *_in("integrations", "argument_checks auxiliary_loss checkpoint_folder config engine_setup"),
    *_in("integrations", "optimizer_choice override_checks sequence_length several_ranks"),
    *_in("integrations", "sft_trainer trainer window"),
    *_in("distributed", "peer_sockets peer_watch rank_group shared_ranks thread_ranks"),
    *_in("storage", "direct_file header layout store store_files tickets volume"),
)
"""Modules whose faults can change a result, a plan's bytes or a file.

Left out are modules that show, measure or estimate (progress, records of steps, reports, the cost
model and the search, whose plans the evaluator checks), and modules that run only with a GPU:
`engine/device`, `engine/device_memory`, `engine/disk_pipe`, `engine/rehearsal`, the Triton kernels
and what launches them. `make test-gpu` tests those.
"""

NEEDS_HARDWARE: dict[str, tuple[str, ...]] = {
    # Launches of Triton kernels, and the sizes of tiles that are fastest on a GPU.
    "src/penstock/model/attention_launch.py": (
        "_LARGE", "_SMALL", "_FP32", "_kernels", "_capability", "forward", "backward",
        "query_gradient", "key_gradients", "launch_key_gradients", "_tiles", "_describe",
        "_current_device", "_launch",
    ),
    "src/penstock/model/varlen_attention.py": ("_forward", "_backward"),
    "src/penstock/engine/loss.py": ("_cross_entropy",),
    # Stripes over several memory nodes, which `make test-vm` tests.
    "src/penstock/engine/host_arenas.py": ("_stripe",),
}  # fmt: skip
"""Functions and constants that matter only with a GPU or other hardware; not in the sample."""

TESTS = (
    "tests/data", "tests/optim", "tests/plan", "tests/checkpoint", "tests/train", "tests/engine",
    "tests/test_records.py", "tests/test_settings.py", "tests/test_roles.py",
    "tests/test_ticket.py", "tests/test_units.py", "tests/test_record_files.py",
    "tests/test_lora_options.py",
    "tests/faults/test_engine_refusals.py", "tests/faults/test_engine_failures.py",
    "tests/faults/test_engine_bounded.py", "tests/faults/test_engine_queued.py",
    "tests/faults/test_model_refusals.py", "tests/model", "tests/planner", "tests/equivalence",
    "tests/storage", "tests/conformance", "tests/faults/test_store_device.py",
    "tests/faults/test_store_crash.py", "tests/cli/test_plan.py", "tests/cli/test_data.py",
    "tests/cli/test_main.py", "tests/memory", "tests/conformance_models", "tests/prediction",
    "tests/autograd", "tests/integrations", "tests/distributed",
)  # fmt: skip
"""Tests of the line map. More would find more, but the map takes as long as all of them."""

MARKERS = "not gpu and not vm and not long and not browser"
