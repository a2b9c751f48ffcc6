"""Look at a model before it is trained: its config, blocks, files and adapter.

The model is in a directory, on the Hub, or in memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import SettingsError
from penstock.model.inventory import Inventory
from penstock.settings import Settings

if TYPE_CHECKING:
    from torch import nn

    from penstock.checkpoint.model_files import ModelFiles
    from penstock.model.adapters import Adapter

SMALL_FILES = ["*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken"]
"""Files of a model on the Hub that are needed in addition to its weights."""


def inspect_model(
    model: str | Path | nn.Module, settings: Settings, *, name: str | None = None,
    runs_head: bool = True,
) -> tuple[Any, Inventory]:  # fmt: skip
    """Load the model's config, and list its blocks and tensors without loading weights.

    `name` is the model's name in the inventory, if it differs from `model`. `runs_head` is False if
    the caller's own code computes the logits.
    """
    from penstock.checkpoint.manifest import check_small_files
    from penstock.model.adapters import without_wrapper
    from penstock.model.changed_modules import check_changed_modules
    from penstock.model.config import load_config, refuse_multimodal
    from penstock.model.language_model import refuse_live_multimodal
    from penstock.model.quantization import refuse_quantized
    from penstock.model.self_check import check_model
    from penstock.model.survey import survey_config, survey_model

    chosen = settings.model
    if isinstance(model, str | Path):
        if Path(model).is_dir():
            check_small_files(model)
        if chosen.init == "random":
            refuse_multimodal(
                model, trust_remote_code=chosen.trust_remote_code, revision=chosen.revision
            )
        config = load_config(
            model,
            trust_remote_code=chosen.trust_remote_code,
            revision=chosen.revision,
            changes=chosen.model_config,
        )
        return config, survey_config(
            config,
            name=str(model) if name is None else name,
            blocks=chosen.blocks,
            freeze=chosen.freeze,
            trust_remote_code=chosen.trust_remote_code,
            adapter=adapter_of(model, settings),
            check=check_model,
        )
    name, model = name or type(model).__name__, without_wrapper(model)
    refuse_live_multimodal(model)
    config = model.config
    refuse_quantized(model, name)
    inventory = survey_model(
        model, config, name=name, blocks=chosen.blocks, freeze=chosen.freeze, check=check_model
    )
    return config, check_changed_modules(model, inventory, runs_head=runs_head)


def adapter_of(model: str | Path | nn.Module, settings: Settings) -> Adapter | None:
    """Return the adapter that is trained: that of the settings, or the one in a live model."""
    from penstock.model.adapters import find_adapter, lora_adapter, without_wrapper

    options = settings.model.lora_options
    if isinstance(model, str | Path):
        return None if options is None else lora_adapter(options)
    if options is not None:
        raise SettingsError(
            "lora", "is for models that are loaded from files; pass peft.get_peft_model(model, ...)"
        )
    return find_adapter(without_wrapper(model))


def check_weights(folder: Path, inventory: Inventory, adapter: Adapter | None = None) -> None:
    """Raise an error if the weights in a directory are not those of the model.

    With an adapter, these are the weights of the model without it.
    Only the headers of the files are read. Tensors that the model does not have, and buffers that
    the files lack, are no error, but a CheckpointWarning names them.
    """
    import torch

    from penstock.checkpoint.errors import CheckpointWarning
    from penstock.checkpoint.model_weights import ModelWeights

    if adapter is not None:
        from penstock.engine.state_io import base_inventory

        inventory = base_inventory(inventory, adapter)
    with ModelWeights(folder, inventory, torch.bfloat16) as weights:
        if weights.unexpected:
            warnings.warn(
                f"{folder}: {len(weights.unexpected)} tensors do not belong to the model that "
                f"config.json describes ({inventory.architecture}), and are neither trained nor "
                f"part of the saved model: {_shorten(weights.unexpected)}",
                CheckpointWarning, stacklevel=3,
            )  # fmt: skip
        if weights.tensors.packed:
            warnings.warn(
                f"{folder}: the MXFP4 weights of the experts are dequantized to BF16 when they are "
                f"read, and trained and saved unquantized",
                CheckpointWarning, stacklevel=3,
            )  # fmt: skip
        if weights.missing_buffers:
            warnings.warn(
                f"{folder}: the files lack {len(weights.missing_buffers)} buffers of the model "
                f"({_shorten(weights.missing_buffers)}), which keep the values that its class sets",
                CheckpointWarning, stacklevel=3,
            )  # fmt: skip


def _shorten(names: Sequence[str]) -> str:
    shown = ", ".join(name[:120] for name in names[:8])
    return shown + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def model_directory(model: str | Path, revision: str | None = None) -> Path:
    """Return the directory with the model's files; download a model of the Hub first."""
    if Path(model).is_dir():
        return Path(model)
    # Only safetensors: other weight formats would be downloaded and never read.
    return _download(str(model), revision, ["*.safetensors", *SMALL_FILES])


def _download(model: str, revision: str | None, patterns: Sequence[str]) -> Path:
    """Return the directory with files of a model of the Hub. Raises NoWeightsError."""
    from huggingface_hub import snapshot_download

    from penstock.checkpoint.errors import NoWeightsError

    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=list(patterns)))
    except (OSError, ValueError) as problem:
        if isinstance(problem, OSError) and problem.errno:
            raise  # of the disk
        reason = (str(problem).strip() or type(problem).__name__).splitlines()[0]
        raise NoWeightsError(
            model[:200], f"is no directory, and was not downloaded from the Hub: {reason:.300}"
        ) from problem


def small_files_directory(model: str | Path, settings: Settings) -> Path:
    """Return the directory with config and tokenizer. Download them if the model is on the Hub."""
    chosen = settings.model
    if Path(model).is_dir():
        return Path(model)
    if chosen.init == "pretrained":
        return model_directory(model, chosen.revision)
    # Random initial weights: leave the pretrained ones on the Hub.
    return _download(str(model), chosen.revision, SMALL_FILES)


def model_files_of(
    model: str | Path | nn.Module, config: Any, inventory: Inventory, settings: Settings
) -> ModelFiles:
    """Find what has to be saved next to the model's weights."""
    from penstock.checkpoint.model_files import ModelFiles
    from penstock.model.config import load_whole_config, text_config
    from penstock.model.meta_model import weight_dtype

    trust, generation_config = settings.model.trust_remote_code, None
    if isinstance(model, str | Path):
        source: Path | None = small_files_directory(model, settings)
        whole = load_whole_config(source or model, trust_remote_code=trust)
        if text_config(whole) is not whole:
            # Saved with all its tensors, so that transformers loads it as the class that it was.
            whole.text_config, config = config, whole
            if hasattr(whole, "quantization_config"):
                del whole.quantization_config
    else:
        source = _origin_of(model)
        generation_config = getattr(model, "generation_config", None)
    return ModelFiles(
        config=config, dtype=weight_dtype(settings.model.dtype), source=source,
        architecture=inventory.architecture, generation_config=generation_config,
        trust_remote_code=trust,
    )  # fmt: skip


def _origin_of(model: nn.Module) -> Path | None:
    """Return the directory that `from_pretrained` read a live model from, if it is on this disk."""
    name = getattr(model, "name_or_path", "")
    if not name or Path(name).is_dir():
        return Path(name) if name else None
    from huggingface_hub import snapshot_download

    try:  # from the cache only: the model was loaded, so that its small files are mostly there
        return Path(snapshot_download(name, allow_patterns=SMALL_FILES, local_files_only=True))
    except (OSError, ValueError):
        return None
