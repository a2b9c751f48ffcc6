"""What lies around the layers is found by what the model computes, not by names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import BartConfig, BloomConfig, LlamaConfig, LlamaForCausalLM, PhiConfig
from transformers.modeling_outputs import BaseModelOutputWithPast

from penstock.errors import SurveyError, UnsupportedModelError
from penstock.model import parameter_flow
from penstock.model.inventory import Inventory
from penstock.model.meta_model import check_trainable
from penstock.model.survey import survey_config, survey_model
from tests.support import engines

CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
)


class Changed(LlamaForCausalLM):
    """A Llama with one more parameter, which a subclass uses."""

    def __init__(self) -> None:
        super().__init__(CONFIG)
        self.model.extra = nn.Parameter(torch.ones(16))


class ScaledEmbedding(Changed):
    def __init__(self) -> None:
        super().__init__()
        self.model.embed_tokens.register_forward_hook(lambda *a: a[2] * self.model.extra)


class ClampedEmbedding(Changed):
    """Its gradients depend on the weights through a comparison only."""

    def __init__(self) -> None:
        super().__init__()
        self.model.embed_tokens.register_forward_hook(
            lambda *a: a[2].clamp(max=0.1) + self.model.extra
        )


class ShiftedEmbedding(Changed):
    def __init__(self) -> None:
        super().__init__()
        self.model.embed_tokens.register_forward_hook(lambda *a: 2 * a[2] + self.model.extra)


class ScaledHead(Changed):
    def __init__(self) -> None:
        super().__init__()
        self.model.norm.register_forward_hook(lambda *a: a[2] * self.model.extra)


class ScaledRotation(Changed):
    def __init__(self) -> None:
        super().__init__()
        self.model.rotary_emb.register_forward_hook(
            lambda *a: tuple(table * self.model.extra[0] for table in a[2])
        )


class UnusedInLayer(Changed):
    """Has a parameter in its second layer that the layer does not use."""

    def __init__(self) -> None:
        super().__init__()
        del self.model.extra
        self.model.layers[1].mlp.extra = nn.Parameter(torch.ones(16))


class ScaledBetweenLayers(Changed):
    """Computes with a parameter between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.model.forward = self._forward

    def _forward(self, input_ids: Any = None, inputs_embeds: Any = None, **_: Any) -> Any:
        hidden = self.model.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        hidden = hidden + self.model.extra
        for layer in self.model.layers:
            hidden = 2 * layer(hidden)
        return BaseModelOutputWithPast(last_hidden_state=self.model.norm(hidden))


def inventory_of(body: Any, **options: Any) -> Inventory:
    return survey_model(body, CONFIG, name="tiny", **options)


def names(inventory: Inventory, block: int) -> list[str]:
    return [tensor.name for tensor in inventory.blocks[block].tensors]


@pytest.mark.parametrize(
    ("body", "linear"),
    [(ScaledEmbedding, False), (ClampedEmbedding, False), (ShiftedEmbedding, True)],
)
def test_a_parameter_before_the_layers_belongs_to_the_embedding(body: Any, linear: bool) -> None:
    inventory = inventory_of(body())

    assert names(inventory, 0) == ["model.extra", "model.embed_tokens.weight"]
    assert inventory.linear_embedding == linear
    check_trainable(inventory)


def test_a_parameter_after_the_layers_belongs_to_the_head() -> None:
    inventory = inventory_of(ScaledHead())

    assert names(inventory, 0) == ["model.embed_tokens.weight"]
    assert names(inventory, -1) == ["model.extra", "model.norm.weight", "lm_head.weight"]
    assert inventory.linear_embedding


@pytest.mark.parametrize(
    ("body", "reason"),
    [(Changed, "model.extra gets no gradient"), (ScaledRotation, "position_embeddings.*extra")],
)
def test_a_parameter_that_would_not_be_trained_is_refused_unless_frozen(
    body: Any, reason: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        check_trainable(inventory_of(body()))

    check_trainable(inventory_of(body(), freeze=["model.extra"]))


def test_a_parameter_that_its_layer_does_not_use_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"layers\.1\.mlp\.extra gets no gradient"):
        check_trainable(inventory_of(UnusedInLayer()))


def test_cross_attention_without_an_encoder_is_refused() -> None:
    config = BartConfig(
        vocab_size=64, d_model=16, decoder_layers=2, decoder_attention_heads=2, decoder_ffn_dim=32
    )
    with pytest.raises(UnsupportedModelError, match="decoder of an encoder-decoder model"):
        check_trainable(survey_config(config, name="bart"))


def test_a_model_whose_layers_return_tuples_has_its_blocks_found() -> None:
    """BLOOM has a norm with weights before its first layer, and one after its last."""
    inventory = survey_config(BloomConfig(hidden_size=16, n_layer=5, n_head=2), name="bloom")

    assert names(inventory, 0)[1:] == [
        "transformer.word_embeddings_layernorm.weight", "transformer.word_embeddings_layernorm.bias"
    ]  # fmt: skip
    assert names(inventory, -1) == ["transformer.ln_f.weight", "transformer.ln_f.bias"]
    assert not inventory.linear_embedding


def test_computing_between_layers_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="between layers 0 and 1"):
        check_trainable(inventory_of(ScaledBetweenLayers()))


def add_spectral_norm(model: Any) -> None:
    nn.utils.parametrizations.spectral_norm(model.model.layers[1].mlp.down_proj)


def add_spectral_norm_to_the_head(model: Any) -> None:
    nn.utils.parametrizations.spectral_norm(model.lm_head)


def add_batch_norm(model: Any) -> None:
    model.model.layers[0].mlp = nn.Sequential(model.model.layers[0].mlp, nn.BatchNorm1d(2))


def add_batch_norm_without_statistics(model: Any) -> None:
    norm = nn.BatchNorm1d(2, track_running_stats=False)
    model.model.layers[0].mlp = nn.Sequential(model.model.layers[0].mlp, norm)


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        return hidden * self.calls


def add_counter(model: Any) -> None:
    model.model.layers[1].mlp = nn.Sequential(model.model.layers[1].mlp, Counter())


def change_the_input(model: Any) -> None:
    model.model.layers[1].input_layernorm.forward = lambda hidden: hidden.mul_(2)


def limit_the_norm_of_embeddings(model: Any) -> None:
    model.model.embed_tokens.max_norm = 0.1


def scale_gradients_by_frequency(model: Any) -> None:
    model.model.embed_tokens.scale_grad_by_freq = True


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (add_spectral_norm, r"changes model\.layers\.1\.mlp\.down_proj.*\._u"),
        (add_spectral_norm_to_the_head, r"changes lm_head.*\._u"),
        (add_batch_norm, r"changes model\.layers\.0\.mlp\.1\.num_batches_tracked"),
        (add_batch_norm_without_statistics, r"layers\.0\.mlp\.1 is a BatchNorm"),
        (add_counter, r"changes model\.layers\.1\.mlp\.1\.calls"),
        (change_the_input, r"changes the input of model\.layers\.1"),
        (limit_the_norm_of_embeddings, r"changes model\.embed_tokens\.weight"),
        (scale_gradients_by_frequency, "has scale_grad_by_freq"),
    ],
)
def test_a_forward_pass_that_changes_tensors_or_needs_the_whole_batch_is_refused(
    change: Any, reason: str
) -> None:
    model = LlamaForCausalLM(CONFIG).eval()  # as from_pretrained returns it
    change(model)
    with pytest.raises((UnsupportedModelError, SurveyError), match=reason):
        check_trainable(inventory_of(model))
    assert not model.training


@pytest.mark.parametrize("name", ["model.norm", "model.layers.1.input_layernorm"])
def test_a_layer_that_shares_a_parameter_is_refused(name: str) -> None:
    model = LlamaForCausalLM(CONFIG)
    model.get_submodule(name).weight = model.model.layers[0].input_layernorm.weight
    with pytest.raises(UnsupportedModelError, match=rf"layers share parameters.*{name}"):
        check_trainable(inventory_of(model))


def test_a_head_whose_matrix_is_computed_has_the_parameters_that_it_is_computed_from() -> None:
    model = LlamaForCausalLM(CONFIG)
    nn.utils.parametrizations.weight_norm(model.lm_head)
    inventory = inventory_of(model)
    assert names(inventory, -1)[-2:] == [
        "lm_head.parametrizations.weight.original0", "lm_head.parametrizations.weight.original1"
    ]  # fmt: skip
    check_trainable(inventory)


def test_a_survey_leaves_a_live_model_as_it_was() -> None:
    body = ScaledEmbedding()
    before = {name: id(tensor) for name, tensor in body.state_dict(keep_vars=True).items()}
    ids = torch.arange(4)[None]
    logits = body(ids).logits

    inventory_of(body)

    assert {n: id(t) for n, t in body.state_dict(keep_vars=True).items()} == before
    assert torch.equal(body(ids).logits, logits)


def test_a_survey_of_a_large_model_computes_without_data() -> None:
    """The table has 100 billion elements, and so would its gradient have."""
    config = PhiConfig(vocab_size=1 << 24, hidden_size=6400, num_hidden_layers=1)
    inventory = survey_config(config, name="large")
    assert inventory.linear_embedding
    assert not inventory.not_trainable


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "gpt_neox", "olmo2"])
def test_tables_and_scales_are_linear(family: str) -> None:
    assert engines.inventory(engines.tiny_config(family)).linear_embedding


def test_a_bias_in_the_head_belongs_to_it() -> None:
    inventory = survey_config(PhiConfig(num_hidden_layers=1), name="phi")
    assert names(inventory, -1)[-2:] == ["lm_head.weight", "lm_head.bias"]


def test_gradients_of_large_weights_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of one layer of a 70B would take 1.6 GiB."""
    largest, mark = [0], parameter_flow._Dependencies.mark

    def measure(self: Any, tensor: torch.Tensor, names: frozenset[str]) -> None:
        largest[0] = max(largest[0], tensor.untyped_storage().nbytes())
        mark(self, tensor, names)

    monkeypatch.setattr(parameter_flow._Dependencies, "mark", measure)
    config = engines.tiny_config("llama", hidden_size=2048, intermediate_size=4096)

    survey_config(config, name="wide")

    assert 0 < largest[0] < 4 * parameter_flow.LARGE
