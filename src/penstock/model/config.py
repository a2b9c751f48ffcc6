"""Load a model's config with transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.errors import SurveyError, UnsupportedModelError
from penstock.model.config_check import (
    adjust_layer_lists,
    check_config_file,
    check_fields,
    check_loads_again,
    config_errors,
    describe,
)
from penstock.model.head_in_files import files_lack_head
from penstock.model.hub import check_name, hub_is_reachable
from penstock.model.quantization import find_quantization


def load_config(
    model: str | Path,
    *,
    trust_remote_code: bool = False,
    revision: str | None = None,
    changes: Mapping[str, Any] | None = None,
    trained: bool = True,
) -> Any:
    """Return the config of the text model.

    Raises UnsupportedModelError if the weights are quantized in a way that cannot be read, or for a
    multimodal model whose text stack cannot be trained.

    Args:
        model: A directory with `config.json`, the file itself, or a Hugging Face model id.
        trust_remote_code: Whether to run code from the model's repository.
        revision: Branch, tag or commit on the Hugging Face hub.
        changes: Fields to set, such as `{"rope_parameters.rope_theta": 1e6}`.
        trained: Whether the model is to be trained.
    """
    whole = load_whole_config(model, trust_remote_code=trust_remote_code, revision=revision)
    find_quantization(whole, str(model))  # the outer config of a multimodal model names the method
    config = text_config(whole)
    if trained:
        _check_parts(whole, config, str(model))
    if config is not whole:
        config.tie_word_embeddings = _ties_head(whole, config, model)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # what is trained and saved is not quantized
    if changes:
        _change_fields(config, changes)
    return config


def _ties_head(whole: Any, text: Any, model: str | Path) -> bool:
    """Return whether transformers ties the head of a multimodal model when it loads the files.

    The outer config decides. If it ties a head that the files have with other values than the
    embedding, as those of Mistral Small 3.1 do, transformers does not tie it.
    """
    from penstock.model.text_stack import ties_head  # imports torch

    return ties_head(whole, text) and (bool(text.tie_word_embeddings) or files_lack_head(model))


def _check_parts(whole: Any, text: Any, name: str) -> None:
    """Raise UnsupportedModelError for a multimodal model whose text stack cannot be trained."""
    if text is not whole:
        from penstock.model.text_stack import check_text_stack  # imports torch

        check_text_stack(whole, text, name)
    parts = [part for part in ("vision_config", "audio_config") if part in whole.sub_configs]
    if text is whole and parts:
        raise UnsupportedModelError(
            f"{name} is a multimodal model of type {whole.model_type!r} whose config has "
            f"{' and '.join(parts)} but no text_config, so Penstock cannot separate its language "
            f"model; save that alone with transformers, and use its directory"
        )


def refuse_multimodal(model: str | Path, **options: Any) -> None:
    """Raise UnsupportedModelError for a multimodal model that would start from random weights.

    The options are those of `load_whole_config`.
    """
    whole = load_whole_config(model, **options)
    if text_config(whole) is not whole:
        raise UnsupportedModelError(
            f"{model} is a multimodal model. Penstock trains its text stack and copies the rest "
            f"from its files, so it cannot start from random weights. Leave out --init random, or "
            f"use the config of the text model"
        )


def text_config(config: Any) -> Any:
    """Return the text part of a multimodal model's config, or the config itself."""
    if not hasattr(config, "get_text_config"):
        return config
    try:
        return config.get_text_config()
    except ValueError:  # several parts are text models
        parts = ", ".join(name for name in config.sub_configs if hasattr(config, name))
        raise UnsupportedModelError(
            f"a model of type {config.model_type!r} is an encoder-decoder model (its config has "
            f"{parts}); Penstock trains decoder-only models"
        ) from None


def _without_config(folder: Path) -> str:
    if (folder / "adapter_config.json").is_file():
        return (
            f"{folder} is an adapter, and no model; merge it with its base model (`penstock merge "
            f"{folder} --into DIRECTORY`) and pass DIRECTORY, or continue its run with --resume"
        )
    return f"{folder} has no config.json, so it is no model"


def load_whole_config(
    model: str | Path, *, trust_remote_code: bool = False, revision: str | None = None
) -> Any:
    """Return a config as it is in `config.json`: for a multimodal model, with all its parts."""
    path = Path(model)
    if path.is_file() and path.name == "config.json":
        path = path.parent
    if path.is_dir() and not (path / "config.json").is_file():
        raise SurveyError(_without_config(path))
    check_name(model)
    import transformers  # takes seconds

    if path.is_dir():
        check_config_file(path / "config.json")
    is_offline = not path.is_dir() and not hub_is_reachable()
    try:
        return transformers.AutoConfig.from_pretrained(
            str(path) if path.is_dir() else str(model),
            trust_remote_code=trust_remote_code,
            revision=revision,
            local_files_only=is_offline,
        )
    except config_errors() as problem:
        if path.is_dir():
            text = f"transformers could not read {model}/config.json: {describe(problem)}"
        else:
            text = _describe_unknown(model, problem, is_offline=is_offline)
        raise SurveyError(text) from None


def _change_fields(config: Any, changes: Mapping[str, Any]) -> None:
    """Set fields, and refuse a config that could not be loaded again."""
    where = "--model-config"
    check_fields({name.rpartition(".")[2]: value for name, value in changes.items()}, where)
    layers = getattr(config, "num_hidden_layers", None)
    for name, value in changes.items():
        try:
            _set_field(config, name, value)
        except config_errors() as wrong:
            raise SurveyError(f"{where} {name}: {describe(wrong)}") from None
    adjust_layer_lists(config, layers, changes)
    check_loads_again(config, where)


def _set_field(config: Any, name: str, value: Any) -> None:
    """Set a field, or an entry of a field that is a dictionary."""
    # Newer configs keep rope_theta and the like inside rope_parameters.
    if not hasattr(config, name) and name in (getattr(config, "rope_parameters", None) or {}):
        name = f"rope_parameters.{name}"
    outer, _, inner = name.partition(".")
    if not hasattr(config, outer):
        known = ", ".join(sorted(k for k in config.to_dict() if not k.startswith("_"))[:40])
        raise SurveyError(f"the model's config has no field {outer!r}; it has {known}")
    if inner:
        holder = getattr(config, outer)
        if not isinstance(holder, dict):
            raise SurveyError(f"the config's {outer} has no entries, so {name} cannot be set")
        holder[inner] = value
    else:
        setattr(config, outer, value)


def _describe_unknown(model: str | Path, problem: Exception, *, is_offline: bool) -> str:
    """Say that a name is neither a directory nor a model that the Hub gives."""
    if is_offline:
        return (
            f"there is no directory {model} here, and the Hub could not be reached; check the "
            f"path, or pass a directory that contains its config.json"
        )
    return (
        f"there is no directory {model} here, and its config could not be loaded from the Hub "
        f"({describe(problem)}); a model of the Hub is named OWNER/NAME"
    )
