"""Forward passes over a cache, for weights that pass block by block. Room: move.

Every row of a step goes through a block before the next one comes: one pass over the weights gives
a token to each sequence of the batch. So it is slow for one prompt, and less so for many.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from penstock.engine.device import Device, pick_device
from penstock.engine.weight_streamer import EngineWeights, HostWeights, Progress, WeightStreamer
from penstock.generate import attention
from penstock.generate.forward import Pass, check_fit
from penstock.model.inventory import Inventory
from penstock.model.skeleton import build_model
from penstock.model.split import Arguments, SplitModel

if TYPE_CHECKING:
    from penstock.engine.engine import Engine

WHOLE = 1 << 62
"""MLPs are not cut into tiles: chunks of prompts are no longer than there is room for."""


class StreamedForward:
    """What a generator needs of a model, without the model on the device."""

    def __init__(
        self, body: SplitModel, weights: WeightStreamer, device: Device, dtype: torch.dtype
    ) -> None:
        self.body, self.weights = body, weights
        self.device, self.dtype = device.torch_device, dtype
        check_fit(body.model, body.layers)
        attention.register()
        layers = [config for layer in body.layers for config in attention.configs_of(layer)]
        found = {id(config): config for config in [*attention.configs_of(body.model), *layers]}
        self._configs = list(found.values())

    @property
    def config(self) -> Any:
        return self.body.model.config

    @property
    def generation_config(self) -> Any:
        return getattr(self.body.model, "generation_config", None)

    def forward(self, cache: Any, passes: Sequence[Pass]) -> list[torch.Tensor]:
        last = len(self.body.layers) + 1
        self.body.train(False)
        with torch.inference_mode(), attention.chosen(self._configs):
            hidden, calls = self._embed(cache, passes)
            for block in range(1, last):
                with self._bound(block):
                    for at, one in enumerate(passes):
                        with one.rows(cache):
                            hidden[at] = self.body.plain_layer(
                                block - 1, hidden[at], calls[at][block - 1]
                            )
            self.body.bind_head(self.weights.wait(last))
            found = [self.body.logits(states[:, -1]) for states in hidden]
            self.weights.drop(last)
            return found

    def close(self) -> None:
        self.body.release()
        self.weights.close()

    def _embed(
        self, cache: Any, passes: Sequence[Pass]
    ) -> tuple[list[torch.Tensor], list[list[Arguments]]]:
        hidden, calls = [], []
        with self._bound(0):
            for one in passes:
                told = one.inputs(self.device)
                states, called = self.body.enter(**told, past_key_values=cache, use_cache=True)
                hidden.append(states)
                calls.append(called)
        return hidden, calls

    @contextlib.contextmanager
    def _bound(self, block: int) -> Iterator[None]:
        """The block's weights are there inside; the next ones come meanwhile."""
        self.body.bind(self.weights.wait(block))
        yield
        self.weights.drop(block)
        self.weights.fetch(block + 1)


def streamed(
    config: Any, inventory: Inventory, folder: Path, *, dtype: torch.dtype, keep: int,
    device: str | None = None, tell: Progress = lambda *_: None, trust_remote_code: bool = False,
) -> StreamedForward:  # fmt: skip
    """A model of files, its weights in host memory; `keep` bytes of them on the device."""
    where = pick_device(device)
    model = build_model(config, dtype, where.torch_device, trust_remote_code=trust_remote_code)
    body = SplitModel(model, inventory, mlp_tile=WHOLE)
    source = HostWeights(inventory, folder, where, dtype, tell)
    return StreamedForward(
        body, WeightStreamer(inventory, source, where, dtype, keep), where, dtype
    )


@contextlib.contextmanager
def engine_forward(engine: Engine) -> Iterator[StreamedForward]:
    """The model that an engine trains, as it is now. Pending sweeps are made first."""
    engine.finish()
    dtype = engine.access.weight_dtype
    weights = WeightStreamer(engine.inventory, EngineWeights(engine), engine.device, dtype, 0)
    try:
        yield StreamedForward(engine.body, weights, engine.device, dtype)
    finally:
        weights.close()
