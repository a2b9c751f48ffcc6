"""A streamed model in a loop of the caller's own: any loss, and what a loop can do wrong."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.nn import functional

import penstock as ps
from penstock.engine.caller_passes import LiveForward
from penstock.errors import BatchError, EngineError, SettingsError, UnsupportedModelError
from tests.support.engines import plain_model, tiny_config

SMALL: dict[str, Any] = {
    "tokens": 64, "budget": {"hbm": "64MiB", "dram": "64MiB"}, "device": "cpu",
    "self_check": False, "lr": 1e-3, "weight_decay": 0.01, "betas": (0.9, 0.999),
}  # fmt: skip


def one_group(named: Any) -> list[dict[str, Any]]:
    return [{"params": [p for _, p in named]}]


def streamed(family: str = "llama", **changes: Any) -> tuple[Any, Any]:
    config = tiny_config(family)
    model = plain_model(config, torch.float32)
    return ps.stream(model, **(SMALL | {"param_groups": one_group} | changes))


def padded_batch(step: int) -> dict[str, torch.Tensor]:
    """Return rows with padding on the left, on the right, on both sides and on none."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(3, 260, (4, 13), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :4] = mask[1, 9:] = mask[2, :2] = mask[2, 11:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def log_probs(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(**batch).logits[:, :-1].float().log_softmax(-1)
    found = logits.gather(2, batch["input_ids"][:, 1:, None])[..., 0]
    return (found * batch["attention_mask"][:, 1:]).sum(1)


def z_loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(**batch).logits
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    return loss + 1e-2 * (logits.logsumexp(-1).square() * batch["attention_mask"]).mean()


def dpo_loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    chosen, rejected = log_probs(model, batch).chunk(2)
    return -functional.logsigmoid(0.1 * (chosen - rejected)).mean()


def kl_loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    reference = torch.linspace(-1, 1, 260).log_softmax(-1)
    logits = model(**batch).logits.log_softmax(-1)
    kl = functional.kl_div(logits, reference.expand_as(logits), log_target=True, reduction="none")
    return (kl.sum(-1) * batch["attention_mask"]).mean()


@pytest.mark.parametrize(
    "loss_of",
    [
        z_loss,
        pytest.param(dpo_loss, marks=pytest.mark.long),
        pytest.param(kl_loss, marks=pytest.mark.long),
    ],
)
def test_twenty_steps_of_a_custom_loss_equal_plain_torch(loss_of: Callable[..., Any]) -> None:
    plain = plain_model(tiny_config("llama"), torch.float32)
    torch_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.01)
    model, optimizer = streamed()
    with model:
        for step in range(20):
            batch, both = padded_batch(step), []
            for one, updates in ((model, optimizer), (plain, torch_optimizer)):
                loss = loss_of(one, batch)
                loss.backward()
                norm = torch.nn.utils.clip_grad_norm_(one.parameters(), 0.5)
                updates.step()
                updates.zero_grad()
                both.append((loss.item(), norm.item()))
            assert both[0] == pytest.approx(both[1], rel=1e-5), step
        expected = plain.state_dict()
        found = model.state_dict()
    assert found.keys() == expected.keys()
    assert max(float((found[n] - expected[n]).abs().max()) for n in expected) < 2e-5


def test_the_norm_is_that_of_the_engine_and_scales_the_update() -> None:
    model, optimizer = streamed(clip=0.25)
    with model:
        z_loss(model, padded_batch(0)).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        again = torch.nn.utils.clip_grad_norm_(model.parameters(), float(norm) / 2)
        halved = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        optimizer.step()
        assert again == norm
        assert float(halved) == pytest.approx(float(norm) / 2, rel=1e-5)
        assert float(norm) == torch.tensor(model.engine.grad_norm).item()


def test_other_norms_of_norms_are_those_of_torch() -> None:
    model, _ = streamed()
    with model:
        z_loss(model, padded_batch(0)).backward()
        norms = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None])
        values = [float(norm) for norm in norms]
        assert float(torch.linalg.vector_norm(norms, torch.inf)) == max(values)
        assert float(torch.linalg.vector_norm(norms, 1)) == pytest.approx(sum(values), rel=1e-5)
        euclidean = sum(value**2 for value in values) ** 0.5
        assert float(torch.linalg.vector_norm(norms)) == pytest.approx(euclidean, rel=1e-5)


def test_gradients_are_scaled_one_by_one_and_together() -> None:
    model, _ = streamed()
    with model:
        z_loss(model, padded_batch(0)).backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norms = [float(gradient.norm()) for gradient in gradients]
        torch._foreach_mul_(gradients, 0.5)
        gradients[0].mul_(3.0).div_(4.0)
        found = [float(gradient.norm()) for gradient in gradients]
    expected = [0.375 * norms[0], *(0.5 * norm for norm in norms[1:])]
    assert found == pytest.approx(expected, rel=1e-6)


def test_what_a_gradient_cannot_do_is_refused() -> None:
    model, optimizer = streamed()
    with model:
        weight = model.model.layers[0].self_attn.q_proj.weight
        weight.grad = None  # it is None already
        with pytest.raises(EngineError, match=r"optimizer\.zero_grad"):
            weight.grad = torch.zeros(weight.shape)
        z_loss(model, padded_batch(0)).backward()
        with pytest.raises(EngineError, match=r"optimizer\.zero_grad"):
            weight.grad = None
        with pytest.raises(EngineError, match="clip_grad_norm_"):
            weight.grad + 1
        with pytest.raises(EngineError, match=r"optimizer\.zero_grad"):
            weight.grad = torch.zeros(weight.shape)
        with pytest.raises(EngineError, match=r"engine\.state"):
            weight.sum()
        with pytest.raises(EngineError, match="clip_grad_norm_"):
            torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
        float(weight.grad.norm())
        with pytest.raises(EngineError, match="no more can be added"):
            z_loss(model, padded_batch(1)).backward()
        optimizer.zero_grad()
        assert weight.grad is None
        z_loss(model, padded_batch(1)).backward()


def test_hooks_on_gradients_run_where_autograd_computes_them_and_are_refused_elsewhere() -> None:
    def zero(gradient: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(gradient)

    model, _ = streamed()
    with model:
        model.lm_head.weight.register_hook(zero)
        for refused in (
            model.model.embed_tokens.weight.register_hook,
            model.model.norm.weight.register_post_accumulate_grad_hook,
            model.model.layers[0].mlp.up_proj.weight.register_post_accumulate_grad_hook,
        ):
            with pytest.raises(EngineError, match="would not run as in torch"):
                refused(zero)
        z_loss(model, padded_batch(0)).backward()
        assert float(model.lm_head.weight.grad.norm()) == 0
        assert float(model.model.norm.weight.grad.norm()) > 0


def test_hooks_on_a_tied_table_are_refused() -> None:
    config = tiny_config("llama", tie_word_embeddings=True)
    model, _ = ps.stream(plain_model(config, torch.float32), **SMALL)
    with model, pytest.raises(EngineError, match="would not run as in torch"):
        model.lm_head.weight.register_hook(print)


def test_parameters_that_are_frozen_or_unfrozen_later_are_refused_by_the_step() -> None:
    plain = plain_model(tiny_config("llama"), torch.float32)
    plain.model.norm.requires_grad_(False)
    model, optimizer = ps.stream(plain, **SMALL)
    with model:
        z_loss(model, padded_batch(0)).backward()
        for module in (model.model.layers[0], model.model.norm, model.lm_head):
            before = [p.requires_grad for p in module.parameters()]
            module.requires_grad_(not before[0])
            with pytest.raises(EngineError, match="decides what is trained"):
                optimizer.step()
            module.requires_grad_(before[0])
        optimizer.step()
        assert model.engine.steps == 1


def test_changes_of_values_are_refused() -> None:
    model, optimizer = streamed()
    with model:
        train_a_step(model, optimizer, 0)
        train_a_step(model, optimizer, 1)
        for weight in (model.model.layers[0].mlp.up_proj.weight, model.model.norm.weight):
            with pytest.raises(EngineError, match="load_state_dict"):
                weight.data = torch.zeros(weight.shape)
        with torch.no_grad():
            model.lm_head.weight.mul_(0.9)
        with pytest.raises(EngineError, match=r"lm_head\.weight cannot be set or changed in place"):
            train_a_step(model, optimizer, 2)


def test_parameters_of_other_modules_need_an_optimizer_of_their_own() -> None:
    model, optimizer = streamed()
    with model:
        with pytest.raises(EngineError, match="Use a second optimizer"):
            optimizer.add_param_group({"params": torch.nn.Linear(32, 1).parameters()})
        z_loss(model, padded_batch(0)).backward()
        optimizer.step()
    model = plain_model(tiny_config("llama"), torch.float32)
    before = model.lm_head.weight.detach().clone()

    def with_others(named: Any) -> list[dict[str, Any]]:
        return [*one_group(named), {"params": torch.zeros(3, requires_grad=True)}]

    with pytest.raises(EngineError, match=r"shape \(3,\) is not a trained parameter"):
        ps.stream(model, **SMALL, param_groups=with_others)
    assert torch.equal(model.lm_head.weight, before)


def test_parameters_have_names_shapes_and_a_device() -> None:
    plain = plain_model(tiny_config("llama"), torch.float32)
    shapes = {n: (p.shape, p.dtype, p.requires_grad) for n, p in plain.named_parameters()}
    model, optimizer = streamed()
    with model:
        found = {n: (p.shape, p.dtype, p.requires_grad) for n, p in model.named_parameters()}
        assert found == shapes
        assert all(isinstance(p, torch.nn.Parameter) for p in model.parameters())
        assert model.device.type == "cpu"
        assert model.dtype == torch.float32
        grouped = [p for group in optimizer.param_groups for p in group["params"]]
        assert {id(p) for p in grouped} == {id(p) for p in model.parameters()}
        assert torch.equal(model.lm_head.weight, plain.lm_head.weight)
    assert torch.equal(model.lm_head.weight, plain.lm_head.weight)
    assert type(model) is type(plain)


def test_the_heads_weights_are_new_right_after_the_step() -> None:
    model, optimizer = streamed()
    with model:
        before = model.lm_head.weight.detach().clone()
        z_loss(model, padded_batch(0)).backward()
        optimizer.step()
        assert not torch.equal(model.lm_head.weight, before)
        assert torch.equal(model.lm_head.weight, model.state_dict()["lm_head.weight"])


def test_a_second_live_forward_is_refused_unless_planned() -> None:
    model, _ = streamed()
    with model:
        first = model(**padded_batch(0)).logits
        with pytest.raises(EngineError, match="live_forwards=2"):
            model(**padded_batch(1))
        with torch.no_grad():
            model(**padded_batch(1))  # needs no memory of its own
        first.sum().backward()
        model(**padded_batch(1))


def test_two_live_forwards_give_the_gradients_of_one_large_batch() -> None:
    batch = padded_batch(0)
    halves = [{n: t[rows] for n, t in batch.items()} for rows in (slice(2), slice(2, 4))]
    norms = []
    for parts, places in (([batch], 1), (halves, 2)):
        model, _ = streamed(live_forwards=places)
        with model:
            found = torch.cat([log_probs(model, part) for part in parts])
            with torch.no_grad():
                log_probs(model, padded_batch(3))
            (found.square().sum() * 1e-4).backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)))
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


def test_dropped_graphs_and_failures_leave_nothing_behind() -> None:
    model, optimizer = streamed()
    with model:
        for _ in range(3):
            loss = z_loss(model, padded_batch(0))
            del loss
            gc.collect()
        with pytest.raises(ZeroDivisionError):
            _fail(z_loss(model, padded_batch(0)))
        z_loss(model, padded_batch(0)).backward()
        optimizer.zero_grad()
        with pytest.raises(EngineError, match=r"loss\.backward\(\) first"):
            optimizer.step()
        z_loss(model, padded_batch(1)).backward()
        found = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9))
    fresh, _ = streamed()
    with fresh:
        z_loss(fresh, padded_batch(1)).backward()
        assert found == float(torch.nn.utils.clip_grad_norm_(fresh.parameters(), 1e9))


def _fail(_: torch.Tensor) -> None:
    raise ZeroDivisionError


def test_a_second_backward_and_one_after_the_step_are_refused() -> None:
    model, optimizer = streamed()
    with model:
        loss = z_loss(model, padded_batch(0))
        loss.backward(retain_graph=True)
        with pytest.raises(EngineError, match="retain_graph"):
            loss.backward()
        optimizer.zero_grad()
        late = z_loss(model, padded_batch(0))
        model.engine._weights_version += 1
        with pytest.raises(EngineError, match="updated after this forward"):
            late.backward()
        with pytest.raises(EngineError, match="gradients of gradients"):
            z_loss(model, padded_batch(0)).backward(create_graph=True)
        z_loss(model, padded_batch(0)).backward()


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda m: m.to(torch.float16), "cannot be moved or converted"),
        (lambda m: m.to("cuda"), "cannot be moved or converted"),
        (lambda m: m.to("cpu:1"), "cannot be moved or converted"),
        (lambda m: m.resize_token_embeddings(300), "before penstock.stream"),
        (copy.deepcopy, "cannot be copied"),
        (lambda m: m.model.layers[0].register_forward_hook(print), "would not run"),
        (lambda m: m.model.layers[0](torch.zeros(1, 2, 32)), r"engine\.state"),
        (lambda m: m.engine.step({}), "loss you compute"),
        (lambda m: m.push_to_hub("x"), "save_pretrained"),
        (lambda m: ps.stream(m, **SMALL), "is streamed already"),
    ],
)
def test_what_a_streamed_model_cannot_do_is_refused(call: Any, problem: str) -> None:
    model, _ = streamed()
    with model, pytest.raises(EngineError, match=problem):
        call(model)


@pytest.mark.parametrize(
    ("inputs", "problem"),
    [
        ({"input_ids": torch.full((2, 40), 5)}, "tokens=128"),
        ({"input_ids": torch.full((1, 65), 5)}, "context=65"),
        ({"input_ids": torch.full((1, 4), 260)}, "from 0 to 259"),
        ({"inputs_embeds": torch.zeros(1, 4, 32)}, "needs input_ids"),
        (
            {"input_ids": torch.full((1, 4), 5), "attention_mask": torch.tensor([[1, 0, 1, 1]])},
            "between others",
        ),
        ({"input_ids": torch.full((1, 4), 5), "output_hidden_states": True}, "does not return"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(inputs: Any, problem: str) -> None:
    model, _ = streamed()
    with model, pytest.raises(BatchError, match=problem):
        model(**inputs)


def test_left_padding_is_refused_for_models_with_attention_code_of_their_own() -> None:
    model, _ = streamed("bloom")
    with model, pytest.raises(UnsupportedModelError, match="pad on the right"):
        model(**padded_batch(0))


def test_a_state_dict_replaces_the_weights() -> None:
    model, _ = streamed()
    with model:
        batch, before = padded_batch(0), model.state_dict()
        with torch.no_grad():
            logits = model(**batch).logits
        weights = {name: tensor + 0.01 for name, tensor in before.items()}
        model.load_state_dict(weights)
        found = model.state_dict()
        with torch.no_grad():
            assert not torch.allclose(model(**batch).logits, logits, atol=1e-3)
    assert all(torch.equal(found[name], weights[name]) for name in weights)


def train_a_step(model: Any, optimizer: Any, step: int) -> None:
    z_loss(model, padded_batch(step)).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_loading_the_present_weights_changes_no_bit_of_the_run(dtype: str) -> None:
    found = []
    for loads in (False, True):
        model, optimizer = streamed(dtype=dtype)
        with model:
            train_a_step(model, optimizer, 0)
            if loads:
                model.load_state_dict(model.state_dict())
            train_a_step(model, optimizer, 1)
            state = model.engine.state
            found.append({(name, key): t for name in state for key, t in state[name].items()})
    assert all(torch.equal(found[0][key], value) for key, value in found[1].items())


def test_loading_other_weights_keeps_moments_and_the_step_as_torch_does() -> None:
    plain = plain_model(tiny_config("llama"), torch.float32)
    torch_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.01)
    model, optimizer = streamed()
    with model:
        for one, updates in ((model, optimizer), (plain, torch_optimizer)):
            first = {name: tensor.clone() for name, tensor in one.state_dict().items()}
            train_a_step(one, updates, 0)
            one.load_state_dict(first)
            train_a_step(one, updates, 1)
        found = model.state_dict()
    expected = plain.state_dict()
    assert max(float((found[n] - expected[n]).abs().max()) for n in expected) < 1e-5


@pytest.mark.parametrize("name", ["model.embed_tokens", "model.layers.1.mlp"])
def test_modules_that_the_engine_runs_may_have_no_hooks(name: str) -> None:
    model = plain_model(tiny_config("llama"), torch.float32)
    model.lm_head.register_forward_hook(lambda *_: None)  # the caller's own code runs the head
    model.get_submodule(name).register_forward_hook(lambda *_: None)
    with pytest.raises(UnsupportedModelError, match=f"{name} has hooks"):
        ps.stream(model, **SMALL)


def test_save_pretrained_and_a_checkpoint_continue_the_run(tmp_path: Path) -> None:
    model, optimizer = streamed()
    with model:
        _train(model, optimizer, 0, 2)
        model.save_checkpoint(tmp_path / "checkpoint")
        model.save_pretrained(tmp_path / "model")
        model.save_pretrained(tmp_path / "model")  # replaces the first
        saved = copy.deepcopy(optimizer.state_dict())
        _train(model, optimizer, 2, 4)
        expected = model.state_dict()
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    for way in ("checkpoint", "state dict"):
        model, optimizer = streamed(budget={"hbm": "8MiB", "dram": "64MiB"})
        with model:
            if way == "checkpoint":
                model.load_checkpoint(tmp_path / "checkpoint")
            else:
                model.load_state_dict(again.state_dict())
                optimizer.load_state_dict(saved)
            _train(model, optimizer, 2, 4)
            found = model.state_dict()
        assert all(torch.equal(found[name], expected[name]) for name in expected), way


def _train(model: Any, optimizer: Any, start: int, stop: int) -> None:
    for step in range(start, stop):
        z_loss(model, padded_batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_generate_gives_the_tokens_of_plain_transformers() -> None:
    plain = plain_model(tiny_config("llama"), torch.float32).eval()
    batch = padded_batch(0)
    batch["attention_mask"][1:] = 1
    expected = plain.generate(**batch, max_new_tokens=3, do_sample=False)
    model, _ = streamed()
    with model:
        model.eval()
        assert torch.equal(model.generate(**batch, max_new_tokens=3, do_sample=False), expected)


def test_dropout_is_repeated_in_backward_and_switched_off_by_eval() -> None:
    config = tiny_config("gpt2", resid_pdrop=0.5)
    model, _ = ps.stream(plain_model(config, torch.float32), **SMALL)
    ids = {"input_ids": torch.full((2, 8), 7)}
    with model, torch.no_grad():
        model.train()
        assert not torch.equal(model(**ids).logits, model.eval()(**ids).logits)
        assert torch.equal(model(**ids).logits, model(**ids).logits)
        model.train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0  # as TRL does it
        assert torch.equal(model(**ids).logits, model.eval()(**ids).logits)


def test_a_directory_is_streamed_without_a_model_in_memory(tmp_path: Path) -> None:
    plain = plain_model(tiny_config("llama"), torch.float32)
    plain.save_pretrained(tmp_path)
    model, optimizer = ps.stream(str(tmp_path), **SMALL)
    batch = padded_batch(0)
    with model:
        # Outputs at padding on the right differ.
        both = [each(**batch).logits[batch["attention_mask"] == 1] for each in (model, plain)]
        assert torch.allclose(*both, atol=1e-5)
        del both
        _train(model, optimizer, 0, 1)
    with pytest.raises(EngineError, match="is closed"):
        model(**batch)


def test_several_processes_are_refused_before_the_model_is_touched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launcher = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}  # fmt: skip
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        SettingsError, match=r"world_size: is 2, but penstock\.stream trains in one"
    ):
        ps.stream(object(), tokens=64)  # type: ignore[arg-type]


def test_torch_compile_does_not_trace_the_engine() -> None:
    model, _ = streamed()
    with model:
        assert model.model.forward._torchdynamo_disable
    LiveForward.__new__(LiveForward).__del__()  # such objects exist where it traces code


def test_positions_that_jump_begin_documents_as_in_transformers() -> None:
    positions = torch.tensor([[0, 1, 2, 3, 7, 8, 9, 3, 4, 5, 0, 0, 1]]).expand(4, 13)
    inputs = {"input_ids": padded_batch(0)["input_ids"], "position_ids": positions}
    plain = plain_model(tiny_config("llama", use_cache=False), torch.float32)
    model, _ = streamed()
    with model, torch.no_grad():
        torch.testing.assert_close(model(**inputs).logits, plain(**inputs).logits)


def test_gradients_that_nobody_has_cleared_are_refused() -> None:
    model, optimizer = streamed()
    with model:
        z_loss(model, padded_batch(0)).backward()
        optimizer.step()
        loss = z_loss(model, padded_batch(1))
        with pytest.raises(EngineError, match=r"zero_grad\(\)"):
            loss.backward()
        del loss
        model.zero_grad()
        train_a_step(model, optimizer, 1)


def test_gradients_of_a_head_that_nobody_has_cleared_are_refused() -> None:
    model, optimizer = streamed(freeze=["model.*"])
    with model:
        z_loss(model, padded_batch(0)).backward()
        optimizer.step()
        z_loss(model, padded_batch(1)).backward()
        with pytest.raises(EngineError, match=r"zero_grad\(\)"):
            optimizer.step()
        optimizer.zero_grad()
        train_a_step(model, optimizer, 1)


@pytest.mark.parametrize("clips", [False, True])
def test_a_head_that_the_loss_does_not_use_must_be_frozen(clips: bool) -> None:
    def step(model: Any, optimizer: Any) -> None:
        model.model(**padded_batch(0)).last_hidden_state.tanh().sum().backward()
        if clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    model, optimizer = streamed()
    with model, pytest.raises(EngineError, match=r"lm_head\.weight got no gradient.*freeze="):
        step(model, optimizer)
    model, optimizer = streamed(freeze=["lm_head.weight"])
    with model:
        before = model.lm_head.weight.clone()
        step(model, optimizer)
        assert torch.equal(model.lm_head.weight, before)


@pytest.mark.parametrize("option", ["maximize", "amsgrad"])
def test_options_of_torch_that_would_be_ignored_are_refused(option: str) -> None:
    model, optimizer = streamed()
    with model:
        z_loss(model, padded_batch(0)).backward()
        optimizer.param_groups[0][option] = True
        with pytest.raises(SettingsError, match=option):
            optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_a_model_of_another_type_needs_the_type_to_compute_in(dtype: torch.dtype) -> None:
    model = plain_model(tiny_config("llama"), dtype)
    with pytest.raises(SettingsError, match="pass dtype='bf16' or dtype='fp32'"):
        ps.stream(model, **SMALL)
    with ps.stream(model, dtype="fp32", **SMALL)[0] as both:
        assert both.engine.workload.dtype == "fp32"
    assert model.lm_head.weight.dtype == dtype


class Scale(torch.nn.Module):
    """Scales by a buffer and by a number, drops out, and adds noise."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.ones(()))
        self.power = 1.0
        self.drop = torch.nn.Dropout(0.0)
        self.drawn: list[torch.Tensor] = []

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out = self.drop(hidden * self.factor**self.power)
        if self.training:
            self.drawn.append(torch.randn(hidden.shape))
            out = out + 0.1 * self.drawn[-1]
        return out


def with_scale() -> Any:
    model = plain_model(tiny_config("llama"), torch.float32)
    layer = model.model.layers[1]
    layer.mlp = torch.nn.Sequential(layer.mlp, Scale())
    return model


def change_a_buffer(part: Any) -> None:
    part.factor.fill_(2.0)


def replace_a_buffer(part: Any) -> None:
    part.factor = torch.ones(())


def change_a_number(part: Any) -> None:
    part.power = 2.0


def switch_dropout_off(part: Any) -> None:
    part.drop.p = 0.5
    part.eval()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (change_a_buffer, r"mlp\.1\.factor was changed"),
        (replace_a_buffer, r"mlp\.1\.factor was changed"),
        (change_a_number, r"mlp\.1\.power was changed"),
        (switch_dropout_off, r"mlp\.1\.drop has dropout and its training mode is False"),
    ],
)
def test_changes_of_modules_that_have_no_effect_are_refused(change: Any, problem: str) -> None:
    model, _ = ps.stream(with_scale(), **SMALL)
    with model:
        model(**padded_batch(0))
        change(model.model.layers[1].mlp[1])
        with pytest.raises(EngineError, match=problem):
            model(**padded_batch(0))


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_random_numbers_of_modules_of_a_caller_are_repeated_in_backward(rate: float) -> None:
    model, _ = ps.stream(with_scale(), **SMALL)
    with model:
        model.model.layers[1].mlp[1].drop.p = rate  # may be changed after penstock.stream
        drawn = model.engine.split_model.layers[1].mlp[1].drawn
        drawn.clear()
        before = torch.get_rng_state()
        z_loss(model, padded_batch(0)).backward()
        assert torch.equal(torch.get_rng_state(), before)
    count = len(drawn) // 2
    assert count
    assert all(
        torch.equal(*each) for each in zip(drawn[:count], drawn[: count - 1 : -1], strict=True)
    )


def test_transformers_own_hook_on_the_embedding_is_taken() -> None:
    model = plain_model(tiny_config("llama"), torch.float32)
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    streamed_model, optimizer = ps.stream(model, **SMALL)
    with streamed_model:
        train_a_step(streamed_model, optimizer, 0)
