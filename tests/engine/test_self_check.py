"""A twin of the model is trained by the engine and by plain torch, and a difference is an error."""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock.engine import self_check as module
from penstock.engine import step_records
from penstock.engine.gradients import GradientSums
from penstock.engine.loss import ChunkedLoss
from penstock.engine.pending_update import PendingUpdate
from penstock.engine.twin_training import clip_gradients
from penstock.errors import SelfCheckError
from penstock.model import document_attention, twin
from penstock.model.split import Calls, MicroBatch, SplitModel
from penstock.optim import rules
from penstock.tiers import Tier
from tests.equivalence.compiled import compile_by
from tests.support.engines import plain_model, tiny_config
from tests.support.self_checks import TILES, check, model_and_plan

Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: Patch, one_thread: None) -> Path:
    """An empty cache, so that every check really runs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "penstock" / "self_checks"


_plain_results: dict[Any, Any] = {}


@pytest.fixture
def plain_training_once(monkeypatch: Patch) -> None:
    """Let tests share plain training, which depends on nothing that they change in the engine."""
    original = module._train_plainly

    def train(twin: Any, workload: Any, first_seed: int) -> Any:
        # The configs of two classes may be equal.
        settings = twin.config.to_json_string(), tuple(twin.freeze), repr(workload)
        key = twin.model_class, *settings, first_seed
        if key not in _plain_results:
            _plain_results[key] = original(twin, workload, first_seed)
        return _plain_results[key]

    monkeypatch.setattr(module, "_train_plainly", train)


# Models that pass.


@pytest.mark.parametrize(
    ("family", "config", "workload"),
    [
        ("llama", {}, {}),
        ("llama", {"tie_word_embeddings": True}, TILES),
        ("gemma2", {}, {"attention": "varlen"}),
        ("gpt2", {"tie_word_embeddings": True}, {"clip": None}),
        ("gpt_neox", {}, {"accumulate": True}),
        ("qwen3", {}, {"dtype": "fp16"}),
        ("llama", {}, {"label_smoothing": 0.1} | TILES),
        ("qwen3", {"num_hidden_layers": 1}, {"batch": 1, "micro_batch": 1}),
    ],
)
def test_the_engine_agrees_with_plain_training(family: str, config: Any, workload: Any) -> None:
    check(family, config=tiny_config(family, **config), **workload)


@pytest.mark.usefixtures("plain_training_once")
def test_a_run_on_the_cpu_that_differs_in_nothing_is_checked_once(monkeypatch: Patch) -> None:
    trained = count_calls(monkeypatch, module, "_train_streamed")

    check("llama", dtype="fp32")
    check("llama")

    assert [each.args[1].where for each in trained] == [
        "on the CPU in fp32",
        "on the CPU in fp32",
        "on cpu in bf16, sdpa attention",
    ]


@pytest.mark.usefixtures("plain_training_once")
def test_the_twin_streams_layers_and_keeps_tiles_chunks_and_rounds(monkeypatch: Patch) -> None:
    plans = []
    original = module.streaming_plan

    def keep(*args: Any) -> Any:
        plans.append(original(*args))
        return plans[-1]

    monkeypatch.setattr(module, "streaming_plan", keep)
    check("llama", dtype="fp32", **TILES)

    (plan,) = plans
    first, second = plan.placement.blocks[1:3]
    assert {share.tier for home in first.homes for share in home.shares} == {Tier.DRAM}
    assert {share.tier for home in second.homes for share in home.shares} == {Tier.HBM}
    numerics, work = plan.workload.numerics, plan.workload
    assert numerics.mlp_tile < numerics.micro_batch * work.context
    assert numerics.loss_chunk < numerics.micro_batch * work.context
    assert work.micro_batches == 2


# Faults.


def drop_the_causal_mask(patch: Patch) -> None:
    def see_all(self: Any, query: Any, key: Any, value: Any) -> torch.Tensor:
        everything = torch.ones(1, 1, query.shape[2], key.shape[2], dtype=torch.bool)
        return self._sdpa(query, key, value, everything)  # type: ignore[no-any-return]

    patch.setattr(document_attention._CausalAttention, "__call__", see_all)


def leak_across_documents(patch: Patch) -> None:
    embed = SplitModel.embed

    def forget(self: SplitModel, micro: MicroBatch) -> tuple[torch.Tensor, Calls]:
        hidden, calls = embed(self, micro)
        return hidden, replace(calls, bounds=None)

    patch.setattr(SplitModel, "embed", forget)


def scale_the_gradient_of_the_embedding(patch: Patch) -> None:
    add = GradientSums.add

    def scaled(self: GradientSums, name: str, gradient: torch.Tensor) -> None:
        add(self, name, gradient * 1.01 if "embed_tokens" in name else gradient)

    patch.setattr(GradientSums, "add", scaled)


def skip_the_update_of_a_layer(patch: Patch) -> None:
    constants = PendingUpdate.constants

    def skip(self: PendingUpdate, segments: Any) -> Any:
        none = rules.Coefficients(fresh1=0.0, fresh2=0.0, eps=1.0)
        found = zip(segments, constants(self, segments), strict=True)
        return [(none if ".layers.0." in s.name else by, key) for s, (by, key) in found]

    patch.setattr(PendingUpdate, "constants", skip)


def use_another_epsilon(patch: Patch) -> None:
    adamw = rules.adamw

    def other(*, eps: float, **options: Any) -> Any:
        return adamw(eps=eps * 1.02, **options)

    patch.setattr(rules, "adamw", other)


def count_ignored_labels(patch: Patch) -> None:
    def count(self: ChunkedLoss, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits.float(), targets.clamp(0), reduction="sum")

    patch.setattr(ChunkedLoss, "_torch_loss", count)


@pytest.mark.usefixtures("plain_training_once")
@pytest.mark.parametrize(
    ("fault", "tensor", "what"),
    [
        (drop_the_causal_mask, "model.layers.0", "output"),
        (leak_across_documents, "model.layers.0", "output"),
        (scale_the_gradient_of_the_embedding, "model.embed_tokens.weight", "gradient"),
        (skip_the_update_of_a_layer, "model.layers.0.self_attn.q_proj.weight", "gradient"),
        (use_another_epsilon, "model.norm.weight", "update"),
        (count_ignored_labels, "loss", "loss"),
    ],
)
def test_a_fault_is_an_error_that_names_the_first_tensor(
    fault: Callable[[Patch], None], tensor: str, what: str, monkeypatch: Patch, cache: Path
) -> None:
    fault(monkeypatch)

    with pytest.raises(SelfCheckError) as error:
        check("llama")

    assert error.value.tensor == tensor
    assert error.value.difference > error.value.limit
    assert error.value.where == "on the CPU in fp32"
    assert f"the {what}" in str(error.value)
    assert "--no-self-check" in str(error.value)
    assert not list(cache.glob("*")), "what failed is checked again the next time"


@pytest.mark.usefixtures("plain_training_once")
def test_a_loss_without_the_smoothing_of_the_run_is_an_error(monkeypatch: Patch) -> None:
    make = ChunkedLoss.__init__

    def forget(self: ChunkedLoss, *args: Any, label_smoothing: float, **options: Any) -> None:
        make(self, *args, **options)

    monkeypatch.setattr(ChunkedLoss, "__init__", forget)

    with pytest.raises(SelfCheckError, match="the loss"):
        check("llama", label_smoothing=0.1)


@pytest.mark.usefixtures("plain_training_once")
def test_a_fault_in_the_attention_of_the_runs_device_only_names_that_path(
    monkeypatch: Patch,
) -> None:
    attend = document_attention.attend_packed

    def scaled(*args: Any, scale: float | None, **options: Any) -> torch.Tensor:
        return attend(*args, scale=2 * (scale or args[0].shape[-1] ** -0.5), **options)

    monkeypatch.setattr(document_attention, "attend_packed", scaled)
    check("llama")

    with pytest.raises(SelfCheckError) as error:
        check("llama", attention="varlen")

    assert error.value.where == "on cpu in bf16, varlen attention"
    assert error.value.tensor == "model.layers.0"


@pytest.mark.usefixtures("plain_training_once")
def test_a_fault_in_compiled_layers_only_names_that_path(monkeypatch: Patch) -> None:
    from penstock.model import compile as compiled

    call = compiled.call_with_weights

    def scaled(shell: Any, weights: Any, args: Any, kwargs: Any) -> Any:
        return call(shell, weights, (args[0] * 1.3, *args[1:]), kwargs)

    compile_by("eager", monkeypatch)
    check("llama", compiled=True)
    monkeypatch.setattr(compiled, "call_with_weights", scaled)
    torch._dynamo.reset()

    with pytest.raises(SelfCheckError, match="with compiled layers") as error:
        check("llama", compiled=True, clip=None)

    assert error.value.tensor == "model.layers.0"


@pytest.mark.usefixtures("plain_training_once")
def test_a_twin_that_cannot_be_trained_is_an_error(monkeypatch: Patch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(SplitModel, "routed_layer", fail)

    with pytest.raises(SelfCheckError, match="RuntimeError: no such kernel"):
        check("llama")


def test_a_result_that_is_not_a_number_is_a_difference() -> None:
    quantity = module.Quantity("loss", "", 1)
    one, nothing = ({quantity: torch.tensor(x)} for x in (1.0, float("nan")))

    assert module.first_difference(one, one, one, 2.0**-8) is None
    assert module.first_difference(nothing, one, one, 2.0**-8) is not None


def results(gradient: torch.Tensor, decay: float = 0.0) -> Any:
    """A gradient, and an update by its sign, as AdamW's is where epsilon is small."""
    update = -gradient.sign() - decay
    kinds = {"loss": torch.tensor(1.0), "gradient": gradient, "update": update}
    return {module.Quantity(kind, "w", 1): tensor for kind, tensor in kinds.items()}


def test_an_update_may_turn_where_rounding_decides_the_sign_of_the_gradient() -> None:
    unit, gradient = 2.0**-8, torch.linspace(1.0, 2.0, 64)
    gradient[3] = 1e-4
    rounded = gradient * (1 + 1e-3)
    turned = gradient.clone()
    turned[3] = -1e-4

    assert (
        module.first_difference(results(turned), results(gradient), results(rounded), unit) is None
    )
    sure, wrong = results(gradient), results(gradient)
    wrong[module.Quantity("update", "w", 1)][5] *= -1  # of a gradient far from zero
    found = module.first_difference(wrong, sure, results(rounded), unit)
    assert found is not None
    assert found.quantity.kind == "update"


def test_a_difference_with_some_tokens_only_is_rounding(monkeypatch: Patch) -> None:
    original, seeds = module._train_plainly, list[int]()

    def train(twin: Any, workload: Any, first_seed: int) -> Any:
        plain = original(twin, workload, first_seed)
        seeds.append(first_seed)
        if len(seeds) > 1:
            return plain
        wrong = {q: 1.5 * each for q, each in plain.expected.items()}
        return plain._replace(expected=wrong, rounded=wrong)

    monkeypatch.setattr(module, "_train_plainly", train)
    check("llama", dtype="fp32")

    assert seeds == [0, module.SEEDS]


def test_an_update_without_a_gradient_is_compared() -> None:
    """The weights of tokens that do not occur have no gradient, and still decay."""
    unit, gradient = 2.0**-8, torch.zeros(64)
    expected = results(gradient, decay=0.1)

    found = module.first_difference(results(gradient), expected, expected, unit)
    assert found is not None
    assert found.quantity.kind == "update"


# The cache.


class Call:
    def __init__(self, args: tuple[Any, ...]) -> None:
        self.args = args


def count_calls(patch: Patch, owner: Any, name: str) -> list[Call]:
    original, calls = getattr(owner, name), list[Call]()

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(Call(args))
        return original(*args, **options)

    patch.setattr(owner, name, counted)
    return calls


@pytest.mark.usefixtures("plain_training_once")
def test_what_passed_is_not_checked_again(monkeypatch: Patch, cache: Path) -> None:
    checked = count_calls(monkeypatch, module, "_run_check")

    check("llama", dtype="fp32")
    larger = tiny_config("llama", intermediate_size=112, vocab_size=300)
    check("llama", config=larger, dtype="fp32")
    assert len(checked) == 1

    (entry,) = cache.iterdir()
    assert stat.S_IMODE(entry.stat().st_mode) == 0o600


@pytest.mark.usefixtures("plain_training_once")
@pytest.mark.parametrize("content", ["", "{", '{"paths": 3}', '{"paths": [], "more": 1}'])
def test_a_damaged_entry_is_ignored(content: str, monkeypatch: Patch, cache: Path) -> None:
    checked = count_calls(monkeypatch, module, "_run_check")
    check("llama", dtype="fp32")
    (entry,) = cache.iterdir()
    entry.write_text(content)

    check("llama", dtype="fp32")

    assert len(checked) == 2
    assert module.load_entry(module.Passed, entry) is not None


def test_another_version_model_or_path_is_checked_again(monkeypatch: Patch) -> None:
    keys = []
    monkeypatch.setattr(module, "_run_check", lambda *_: None)
    monkeypatch.setattr(module, "save_entry", lambda _, path: keys.append(path.name))

    check("llama")
    check("llama", config=tiny_config("llama", rms_norm_eps=1e-3))
    check("llama", attention="varlen")
    check("llama", **TILES)
    check("llama", dtype="fp16")
    check("qwen3")
    for package in twin.PACKAGES:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(twin, "_version", lambda name, p=package: "0" if name == p else "1")
            check("llama")
    monkeypatch.setattr(twin, "code_fingerprint", lambda: "other code")
    check("llama")

    assert len(set(keys)) == len(keys) == 7 + len(twin.PACKAGES)


@pytest.mark.usefixtures("plain_training_once")
def test_a_class_of_the_users_own_is_checked_every_time(monkeypatch: Patch, cache: Path) -> None:
    import transformers

    class Own(transformers.LlamaForCausalLM):
        pass

    checked = count_calls(monkeypatch, module, "_run_check")
    config = tiny_config("llama")
    with torch.device("meta"):
        model = Own(config)
    for _ in range(2):
        module.self_check(model, *model_and_plan(config, dtype="fp32"), module.CpuDevice())

    assert len(checked) == 2
    assert not cache.exists()


# What it leaves behind.


@pytest.fixture
def unusual_settings() -> Iterator[None]:
    """Settings of torch that a user may have, other than its defaults."""
    torch.manual_seed(11)
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_grad_enabled(False)
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    torch.set_grad_enabled(True)
    torch.set_float32_matmul_precision("highest")


def settings_of_torch() -> dict[str, Any]:
    return {
        "random state": torch.get_rng_state().tolist(),
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "fill": torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        "gradients": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "matmul": torch.get_float32_matmul_precision(),
        "device": torch.get_default_device(),
        "threads": torch.get_num_threads(),
        "compiler": dict(torch._inductor.config.get_config_copy()),
    }


def test_the_users_random_state_and_settings_stay(unusual_settings: None) -> None:
    before = settings_of_torch()

    check("llama", attention="varlen")

    assert settings_of_torch() == before


def test_a_generator_of_the_gpu_is_not_seeded(monkeypatch: Patch) -> None:
    seeded = count_calls(monkeypatch, torch.cuda, "manual_seed_all")

    check("gpt2")

    assert not seeded


def test_it_runs_in_inference_mode() -> None:
    with torch.inference_mode():
        check("llama")


def test_steps_of_the_twin_are_not_reported_to_observers(monkeypatch: Patch) -> None:
    class Observer:
        def step_started(self, *_: Any, **__: Any) -> None:
            pytest.fail("a step of the twin")

        def step_finished(self, _: Any) -> None:
            pytest.fail("a step of the twin")

    observer = Observer()
    step_records.add_observer(observer)  # type: ignore[arg-type]
    try:
        check("llama")
        assert observer in step_records._observers
    finally:
        step_records.remove_observer(observer)  # type: ignore[arg-type]


# `prepare`.

SMALL: dict[str, Any] = {
    "context": 32, "batch": 2, "device": "cpu", "budget": {"hbm": "64MiB", "dram": "64MiB"},
}  # fmt: skip


@pytest.mark.usefixtures("plain_training_once")
def test_prepare_fails_before_it_allocates_and_gives_a_live_model_back(
    monkeypatch: Patch,
) -> None:
    use_another_epsilon(monkeypatch)
    allocated = count_calls(monkeypatch, penstock.engine.engine, "allocate")
    model = plain_model(tiny_config("llama"))
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    with pytest.raises(SelfCheckError):
        penstock.prepare(model, **SMALL)

    assert {each.args[0].model for each in allocated} == {"twin"}
    assert all(torch.equal(weights[name], now) for name, now in model.state_dict().items())


def test_prepare_without_a_self_check_says_so_in_checkpoints_and_after_a_resume(
    monkeypatch: Patch, tmp_path: Path
) -> None:
    checked = count_calls(monkeypatch, module, "_run_check")
    with penstock.prepare(plain_model(tiny_config("llama")), self_check=False, **SMALL) as engine:
        assert not engine.self_checked
        assert not checked
        engine.write(tmp_path)
    with penstock.prepare(plain_model(tiny_config("llama")), **SMALL) as engine:
        assert engine.self_checked
        engine.read(tmp_path)
        assert not engine.self_checked
        assert engine.result_record()["self_checked"] is False


def test_the_reference_clips_by_an_exact_norm() -> None:
    """torch's norm in fp32 of this many elements is wrong by more than the check allows."""
    parameter = torch.nn.Parameter(torch.zeros(2_000_000))
    gradient = torch.rand(2_000_000, generator=torch.Generator().manual_seed(0)) ** 8
    parameter.grad = gradient.clone()
    exact = float(gradient.double().square().sum().sqrt())

    assert clip_gradients([parameter], 0.5) == pytest.approx(exact, rel=1e-9)
    expected = gradient.double() * (0.5 / (exact + 1e-6))
    torch.testing.assert_close(parameter.grad.double(), expected, rtol=1e-6, atol=1e-30)
    parameter.grad = gradient.clone()
    clip_gradients([parameter], 2 * exact)
    assert torch.equal(parameter.grad, gradient)
