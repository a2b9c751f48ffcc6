"""Models that are built from a config without memory for their parameters."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from transformers import modeling_utils

from penstock.model.meta_model import build_model
from tests.support.engines import tiny_config


def test_a_model_does_not_recommend_a_mask_for_padding() -> None:
    config = tiny_config("gpt2")
    config.pad_token_id = 0
    model: Any = build_model(config, torch.float32, torch.device("cpu"))
    ids = torch.zeros(1, 4, dtype=torch.int64)

    with mock.patch.object(modeling_utils.logger, "warning_once") as warned:
        model.transformer.warn_if_padding_and_no_attention_mask(ids, None)

    warned.assert_not_called()
