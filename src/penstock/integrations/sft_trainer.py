"""TRL's SFTTrainer, with Penstock's engine in place of model and optimizer.

TRL prepares the data (chat templates, packing, labels of assistant turns) and logs token accuracy
and entropy. The engine returns these for each token, next to the loss.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch

from penstock.engine.engine import Engine
from penstock.engine.loss import LossFunction, TokenValues
from penstock.errors import SettingsError
from penstock.integrations.trainer import PenstockTrainerMixin
from penstock.integrations.window import Window
from penstock.model.adapters import without_wrapper


def _sft_trainer() -> Any:
    try:
        return importlib.import_module("trl").SFTTrainer
    except ImportError as missing:
        raise ImportError(
            f"PenstockSFTTrainer needs TRL, which cannot be imported ({missing}). Install it: "
            f"pip install trl"
        ) from missing


_SFTTrainer: Any = _sft_trainer()


class PenstockSFTTrainer(PenstockTrainerMixin, _SFTTrainer):  # type: ignore[misc]
    """TRL's SFTTrainer, with Penstock's engine in place of model and optimizer."""

    _loss_without_targets = 0.0

    def __init__(self, model: Any, args: Any = None, *rest: Any, **kwargs: Any) -> None:
        if isinstance(model, str):
            args = _with_model_on_host(model, args)
        super().__init__(model, args, *rest, **kwargs)
        if self.aux_loss_enabled:
            raise SettingsError(
                "router_aux_loss_coef",
                f"is {self.router_aux_loss_coef}, but the engine has no router logits at the loss; "
                f"pass router_aux_loss_coef=0.0 in SFTConfig",
            )

    def _loss_function(self) -> LossFunction | None:
        return _dft_loss if self.args.loss_type == "dft" else None

    def _open_engine(self, *, show: bool) -> Engine:
        # TRL replaces `forward` of the model by a function that keeps the original model. The
        # engine's copy of the model must not call it.
        self._own_forward = vars(without_wrapper(self.model)).pop("forward", None)
        try:
            engine = super()._open_engine(show=show)
        except BaseException:
            self._put_forward_back()
            raise
        engine.keeps_token_values = True
        return engine

    def _close_engine(self) -> None:
        is_open = self.engine is not None
        super()._close_engine()
        if is_open:
            self._put_forward_back()

    def _put_forward_back(self) -> None:
        if self._own_forward is not None:
            without_wrapper(self.model).forward = self._own_forward

    def _count_evaluation_items(self, inputs: Mapping[str, Any]) -> None:
        """Return None: TRL evaluates the mean over the tokens of a batch."""
        return

    def _note_tokens(
        self,
        micro_batches: list[Mapping[str, Any]],
        window: Window,
        values: list[TokenValues],
        *,
        training: bool,
    ) -> None:
        """Add token accuracy, entropy and the number of tokens to what TRL logs."""
        metrics = self._metrics["train" if training else "eval"]
        entropy, is_top = (
            torch.cat(side) for side in zip(*((v.entropy, v.is_top) for v in values), strict=True)
        )
        targets = window.targets
        for number, inputs in enumerate(micro_batches):
            chosen = targets & (window.owners == number)
            count = max(1, int(chosen.sum()))
            metrics["entropy"].append(float(entropy[chosen].sum()) / count)
            metrics["mean_token_accuracy"].append(float(is_top[chosen].sum()) / count)
            if training:
                self._total_train_tokens += _tokens(inputs)
        metrics["num_tokens"] = [self._total_train_tokens]


def _tokens(inputs: Mapping[str, Any]) -> int:
    """Return the number of tokens of a micro-batch as TRL counts them."""
    if "attention_mask" in inputs:
        return int(inputs["attention_mask"].sum())
    return int(inputs["position_ids"].shape[1])


def _dft_loss(log_probs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Weight each token's loss by its probability: dynamic fine-tuning (arXiv:2508.05629)."""
    return -(log_probs * log_probs.exp().detach()).sum()


def _with_model_on_host(model: str, args: Any) -> Any:
    """Let TRL load a model by its name into host memory, not onto the GPU."""
    if args is None:
        args = importlib.import_module("trl").SFTConfig(f"{model.rsplit('/', maxsplit=1)[-1]}-SFT")
    if hasattr(args, "model_init_kwargs"):
        args.model_init_kwargs = {"device_map": None, **(args.model_init_kwargs or {})}
    return args
