"""A live model whose modules a caller has changed is computed as it is, or refused."""

from __future__ import annotations

import copy
import types
import warnings
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional
from transformers.models.llama import modeling_llama

import penstock
from penstock.errors import UnsupportedModelError
from penstock.model import changed_modules
from penstock.model.changed_modules import ChangedModuleWarning, check_changed_modules
from penstock.model.inventory import Inventory
from penstock.model.self_check import check_model
from penstock.model.survey import survey_model
from tests.support.engines import FAMILIES, plain_model, tiny_config

OPTIONS: dict[str, Any] = {
    "dtype": "fp32", "device": "cpu", "self_check": False,
    "budget": {"hbm": "64MiB", "dram": "64MiB"},
}  # fmt: skip


def tiny(attention: str = "sdpa") -> Any:
    config = tiny_config("llama")
    config._attn_implementation = attention
    model = plain_model(config, torch.float32)
    for parameter in model.parameters():
        if parameter.dim() > 1:  # so that everything that a layer computes shows
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return model


def examined(model: Any, *, runs_head: bool = True) -> Inventory:
    inventory = survey_model(model, model.config, name="tiny", check=check_model)
    return check_changed_modules(model, inventory, runs_head=runs_head)


def attend_with_mask(self: Any, hidden_states: Any, position_embeddings: Any = None,
                     attention_mask: Any = None, **_: Any) -> Any:  # fmt: skip
    """Attention as older code computes it: with the mask that the layer gets."""
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    query, key, value = (
        part(hidden_states).view(shape).transpose(1, 2)
        for part in (self.q_proj, self.k_proj, self.v_proj)
    )
    query, key = modeling_llama.apply_rotary_pos_emb(query, key, *position_embeddings)
    key, value = (each.repeat_interleave(self.num_key_value_groups, 1) for each in (key, value))
    scores = query @ key.transpose(2, 3) * self.scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    out = (scores.softmax(-1) @ value).transpose(1, 2)
    return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), None


class Conv(nn.Module):
    """Adds the token before each one."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + functional.pad(hidden, (0, 0, 1, 0))[:, :-1]


def replace_attention(model: Any) -> None:
    attention = model.model.layers[1].self_attn
    attention.forward = types.MethodType(attend_with_mask, attention)


def see_later_tokens(model: Any) -> None:
    model.model.layers[2].input_layernorm.register_forward_hook(lambda *a: a[2] + a[2].sum(1, True))


def mix_rows(model: Any) -> None:
    model.model.layers[0].input_layernorm.register_forward_hook(lambda *a: a[2] + a[2].sum(0, True))


def convolve_in_mlp(model: Any) -> None:
    model.model.layers[0].mlp = nn.Sequential(Conv(), model.model.layers[0].mlp)


def convolve_after_layers(model: Any) -> None:
    model.model.norm = nn.Sequential(model.model.norm, Conv())


class Warmup(nn.Module):
    calls = 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        return hidden * (1 + self.calls)


def count_calls(model: Any) -> None:
    layer = model.model.layers[1]
    layer.mlp = nn.Sequential(layer.mlp, nn.Dropout(0.1), Warmup())


def look_both_ways(model: Any) -> None:
    model.model.layers[0].self_attn.is_causal = False


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (replace_attention, r"layers\.1\.self_attn, .* computes something else"),
        (see_later_tokens, r"layers\.2\.input_layernorm, .* looks at later tokens"),
        (mix_rows, r"layers\.0\.input_layernorm, .* mixes the sequences"),
        (convolve_in_mlp, r"layers\.0\.mlp, .* mixes tokens.* in tiles"),
        (convolve_after_layers, r"model\.norm, .* mixes tokens after the last layer"),
        (count_calls, r"layers\.1\.mlp, .* something else in every call"),
        (look_both_ways, r"layers\.0\.self_attn, .* cannot be run.* later tokens"),
    ],
)
def test_changes_that_penstock_would_compute_wrongly_are_refused(change: Any, problem: str) -> None:
    model = tiny("eager")
    change(model)
    before = {n: id(t) for n, t in model.state_dict(keep_vars=True).items()}
    with pytest.raises(UnsupportedModelError, match=problem):
        penstock.prepare(model, context=16, batch=1, **OPTIONS)
    with pytest.raises(UnsupportedModelError, match=problem):
        penstock.stream(model, tokens=16, **OPTIONS)
    assert {n: id(t) for n, t in model.state_dict(keep_vars=True).items()} == before
    assert model.training


def test_a_head_that_mixes_tokens_is_refused_unless_the_caller_computes_it() -> None:
    model = tiny()
    model.lm_head.register_forward_pre_hook(lambda _, inputs: (Conv()(inputs[0]),))
    assert "lm_head" in examined(model).not_trainable
    assert not examined(model, runs_head=False).not_trainable


def convolve_embeddings(model: Any) -> None:
    model.model.embed_tokens.register_forward_hook(lambda *a: Conv()(a[2]))


def convolve_in_a_layer(model: Any) -> None:
    model.model.layers[0].input_layernorm.register_forward_hook(lambda *a: Conv()(a[2]))


@pytest.mark.parametrize("change", [convolve_embeddings, convolve_in_a_layer])
def test_changes_that_mix_documents_are_refused_for_packed_rows_only(change: Any) -> None:
    model = tiny()
    change(model)
    inventory = examined(model)
    assert not inventory.not_trainable
    assert "was changed in the live model" in inventory.mixes_documents


def bound_mlp(model: Any) -> None:
    def forward(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.down_proj(self.act_fn(self.gate_proj(hidden))))

    for layer in model.model.layers:
        layer.mlp.up_proj = nn.Identity()
        layer.mlp.forward = types.MethodType(forward, layer.mlp)


def square_with_hook(model: Any) -> None:
    model.model.layers[1].mlp.register_forward_hook(lambda *a: a[2] * a[2])


@pytest.mark.parametrize("change", [bound_mlp, square_with_hook])
def test_backward_of_a_changed_layer_leaves_out_nothing(change: Any) -> None:
    """The class of the model needs no result of `down_proj` in backward, and this function does."""
    model = tiny()
    change(model)
    plain = copy.deepcopy(model)
    ids = torch.randint(3, 260, (2, 12), generator=torch.Generator().manual_seed(1))
    options = {"lr": 1e-2, "weight_decay": 0.0, "betas": (0.9, 0.999), "clip": None}
    with penstock.prepare(model, context=12, batch=2, **OPTIONS, **options) as engine:
        loss = engine.step({"input_ids": ids})
        norm = engine.grad_norm
    expected = plain(input_ids=ids, labels=ids).loss
    expected.backward()
    assert float(loss) == pytest.approx(float(expected.detach()), rel=1e-5)
    gradients = [p.grad.norm() for p in plain.parameters() if p.grad is not None]
    assert norm == pytest.approx(float(torch.stack(gradients).norm()), rel=1e-4)


def test_attention_with_dropout_of_its_own_does_not_use_kernels_that_have_none() -> None:
    model = tiny()
    assert examined(model).plain_attention

    model.model.layers[1].self_attn.attention_dropout = 0.1

    assert not examined(model).plain_attention


@pytest.mark.parametrize("family", [*FAMILIES, "gpt2", "falcon", "qwen3_moe", "deepseek_v3"])
def test_models_as_their_class_makes_them_are_not_examined(family: str) -> None:
    model = plain_model(tiny_config(family), torch.float32)
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    assert changed_modules._find_changed(model) == []
    if family == "llama":
        get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", use_dora=True))
        assert changed_modules._find_changed(model) == []


@pytest.mark.parametrize("name", ["model.layers.1.mlp", "model.norm"])
def test_a_changed_module_that_does_not_run_here_is_named_in_a_warning(name: str) -> None:
    def forward(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("this kernel needs a GPU")

    model = tiny()
    inventory = survey_model(model, model.config, name="tiny", check=check_model)
    module = model.get_submodule(name)
    module.forward = types.MethodType(forward, module)
    with pytest.warns(ChangedModuleWarning, match=r"(layers\.1|norm) .*needs a GPU"):
        check_changed_modules(model, inventory, runs_head=True)


def test_a_method_that_was_replaced_in_a_class_is_checked_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny("eager")
    assert not examined(model).not_trainable
    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", attend_with_mask)
    assert "LlamaAttention" in examined(model).not_trainable
    monkeypatch.undo()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not examined(model).not_trainable
