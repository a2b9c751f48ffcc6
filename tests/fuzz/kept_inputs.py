"""Inputs that once ended with a traceback or took minutes, by what was wrong with them.

`config` changes fields of the model's config.json, and `state` a part of training_state.json. They
are small changes to files that the test creates; all others are whole cases.
"""

from __future__ import annotations

from typing import Any

CONFIGS: dict[str, Any] = {
    "num_hidden_layers": "1",
    "hidden_size": 2147483648,
    "num_attention_heads": 5,
    "bos_token_id": 1.0,
    "tie_word_embeddings": 0,
    "hidden_act": {},
    "model_type": [0],
    "head_dim": 8.0,
    "rope_parameters": "nan",
    "vocab_size": -32,
    "max_position_embeddings": 10**400,
    "intermediate_size": 0,
    "num_key_value_heads": True,
}

COMMANDS: dict[str, tuple[str, ...]] = {
    "frozen": ("--freeze", "*"),
    "vocabulary": ("--model-config", "vocab_size=0"),
    "vocabulary type": ("--model-config", 'vocab_size={"": {"": {}}}'),
    "digits": ("--hbm", "9" * 5000),
    "digits of a micro-batch": ("--micro-batch", "9" * 5000),
    "nvme": ("--nvme", f"/tmp:1{'0' * 400}"),
    "hbm": ("--hbm", f"1{'0' * 400}"),
    "batch": ("--batch", "100000000"),
    "huge batch": ("--batch", "9223372036854775807"),
    "nested": ("--model-config", "rope_theta=" + "[" * 100000),
}

RUN_FILES: dict[str, str] = {
    "nested lists": "[" * 10000,
    "nested objects": '{"a":' * 10000 + "1",
    "digits": f"steps: {'9' * 5000}\n",
    "date": "lr: 2024-99-99\n",
}

STATES: dict[tuple[str, ...], Any] = {
    ("data",): 7,
    ("data", "row"): 10**30,
    ("engine", "groups"): 3,
    ("engine", "groups", "1", "betas"): ["x", 0.9],
    ("engine", "groups", "0", "betas"): [0.9],
    ("engine", "groups", "0", "lr"): None,
}
