"""Forward passes over the cache, for weights that are streamed to the device block by block.

All rows of a step go through a block before the next block is needed: streaming the weights once
gives a token to every sequence of the batch. So this is slow for one prompt, and less so for many.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from penstock.engine.device import Device, pick_device
from penstock.engine.weight_streamer import EngineWeights, HostWeights, Progress, WeightStreamer
from penstock.generate.attention import register_row_attention
from penstock.generate.forward import ForwardPass, check_fit
from penstock.generate.requests import UnfitModelError
from penstock.model.attention import CACHED_ROWS, attention_configs, using_attention
from penstock.model.inventory import Inventory
from penstock.model.layer_probe import Arguments
from penstock.model.meta_model import build_model
from penstock.model.split import SplitModel

if TYPE_CHECKING:
    from penstock.engine.engine import Engine

NO_TILES = 1 << 62
"""Tile size of MLPs, in tokens: chunks of prompts are so short that MLPs need not be tiled."""


class StreamedForward:
    """Runs passes with a model whose weights are not on the device as a whole."""

    def __init__(
        self, split_model: SplitModel, weights: WeightStreamer, device: Device, dtype: torch.dtype
    ) -> None:
        self.split_model, self.weights = split_model, weights
        self.device, self.dtype = device.torch_device, dtype
        _refuse_own_attention(split_model.inventory)
        check_fit(split_model.model, split_model.layers)
        register_row_attention()
        self._configs = attention_configs(split_model.model, *split_model.layers)

    @property
    def config(self) -> Any:
        return self.split_model.model.config

    @property
    def generation_config(self) -> Any:
        return getattr(self.split_model.model, "generation_config", None)

    def forward(self, cache: Any, passes: Sequence[ForwardPass]) -> list[torch.Tensor]:
        """Run all passes through each block before the next block is streamed."""
        last = len(self.split_model.layers) + 1
        self.split_model.train(False)
        with torch.inference_mode(), using_attention(self._configs, CACHED_ROWS):
            hidden, calls = self._embed(cache, passes)
            for block in range(1, last):
                with self._bound(block):
                    for i, forward_pass in enumerate(passes):
                        with forward_pass.rows(cache):
                            hidden[i] = self.split_model.plain_layer(
                                block - 1, hidden[i], calls[i][block - 1]
                            )
            self.split_model.bind_head(self.weights.wait(last))
            scores = [self.split_model.logits(states[:, -1]) for states in hidden]
            self.weights.drop(last)
            return scores

    def close(self) -> None:
        """Release the weights."""
        self.split_model.release()
        self.weights.close()

    def _embed(
        self, cache: Any, passes: Sequence[ForwardPass]
    ) -> tuple[list[torch.Tensor], list[list[Arguments]]]:
        hidden, calls = [], []
        with self._bound(0):
            for forward_pass in passes:
                inputs = forward_pass.inputs(self.device)
                states, called = self.split_model.enter(
                    **inputs, past_key_values=cache, use_cache=True
                )
                hidden.append(states)
                calls.append(called)
        return hidden, calls

    @contextlib.contextmanager
    def _bound(self, block: int) -> Iterator[None]:
        """Bind the weights of one block of the model, and afterwards fetch those of the next."""
        self.split_model.bind(self.weights.wait(block))
        yield
        self.weights.drop(block)
        self.weights.fetch(block + 1)


def stream_model(
    config: Any, inventory: Inventory, folder: Path, *, dtype: torch.dtype, keep: int,
    device: str | None = None, progress: Progress = lambda *_: None,
    trust_remote_code: bool = False, adapter: Path | None = None,
) -> StreamedForward:  # fmt: skip
    """Load a model's weights from files into host memory, `keep` bytes of them onto the device.

    An `adapter` in another directory is merged into them.
    """
    _refuse_own_attention(inventory)  # before weights are read
    target = pick_device(device)
    model = build_model(config, dtype, target.torch_device, trust_remote_code=trust_remote_code)
    split_model = SplitModel(model, inventory, mlp_tile=NO_TILES)
    source = HostWeights(inventory, folder, target, dtype, progress, split_model.buffers, adapter)
    return StreamedForward(
        split_model, WeightStreamer(inventory, source, target, dtype, keep), target, dtype
    )


def _refuse_own_attention(inventory: Inventory) -> None:
    if inventory.own_attention:
        raise UnfitModelError(
            f"{inventory.model} computes attention with its own code, so it cannot read Penstock's "
            f"cache row by row; use model.generate() of transformers"
        )


@contextlib.contextmanager
def engine_forward(engine: Engine) -> Iterator[StreamedForward]:
    """Run passes with the weights that an engine trains, after pending optimizer sweeps."""
    engine.finish()
    dtype = engine.access.weight_dtype
    weights = WeightStreamer(engine.inventory, EngineWeights(engine), engine.device, dtype, 0)
    try:
        yield StreamedForward(engine.split_model, weights, engine.device, dtype)
    finally:
        weights.close()
