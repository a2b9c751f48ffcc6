"""Merge a trained adapter into the weights of its base model, and write the whole model."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import partial
from pathlib import Path

from penstock.checkpoint.adapter_files import BASE, CONFIG, BaseModel, is_adapter
from penstock.checkpoint.disk import check_room, translate_write_errors
from penstock.checkpoint.errors import NoWeightsError
from penstock.checkpoint.manifest import check_small_files, find_manifest
from penstock.checkpoint.merged_weights import MergedWeights
from penstock.checkpoint.model_files import copy_model_files
from penstock.checkpoint.record_files import record_model
from penstock.checkpoint.writer import Progress, ShardWriter, TensorOut
from penstock.engine.model_source import model_directory, model_files_of
from penstock.errors import SettingsError
from penstock.generate.load import find_weights, missing_base_explained
from penstock.model.hub import check_name
from penstock.settings import Settings


def merge(
    source: str | Path,
    into: Path,
    *,
    base: str | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> int:
    """Write the model with a merged adapter to an empty or new directory; return its bytes.

    Args:
        source: Directory of the adapter, or output directory of a run.
        into: Where to write.
        base: The base model, if it is not where it was when the adapter was trained.
        trust_remote_code: Whether to run code from the model's repository.
        progress: Called with bytes written, the total, and the name of the tensor.
    """
    folder = Path(find_weights(str(source)))
    if not is_adapter(folder):
        raise NoWeightsError(
            str(source),
            f"there is no adapter: neither {CONFIG} nor a run of `penstock train --lora`",
        )
    if into.exists() and any(into.iterdir()):
        raise SettingsError("into", f"must name a new or empty directory, and {into} is not empty")
    check_small_files(folder)
    recorded = BaseModel.load(folder)
    name = base or recorded.path
    if not name:
        raise SettingsError("base", f"is needed: {folder / BASE} does not name the base model")
    with contextlib.nullcontext() if base else missing_base_explained(folder):
        check_name(name)
        directory = model_directory(name, None if base else recorded.revision or None)
    chosen = Settings.of({"trust_remote_code": trust_remote_code})
    with MergedWeights(folder, directory, trust_remote_code=trust_remote_code) as weights:
        tensors = _tensors(weights)
        writer = ShardWriter(tensors)
        files = model_files_of(directory, weights.config, weights.inventory, chosen)
        files = replace(files, dtype=max(tensors, key=lambda tensor: tensor.nbytes).dtype)
        with translate_write_errors(into, writer.nbytes):
            into.mkdir(parents=True, exist_ok=True)
            check_room(into, writer.nbytes)
            shards = writer.write(into, progress)
            # The tokenizer that the adapter was trained with comes first.
            own = ("config.json", "generation_config.json", CONFIG, BASE)
            copy_model_files(folder, into, exclude=own)
            files.write(into)
            manifest = find_manifest(folder)
            record_model(into, shards, step=manifest.step if manifest else 0)
    return writer.nbytes


def _tensors(weights: MergedWeights) -> list[TensorOut]:
    """List all tensors of the merged model, with the names and forms of the base model's files."""
    found: list[TensorOut] = []
    saved = weights.base.saved_names
    splits = saved.splits_by_tensor()
    for tensor in (tensor for block in weights.inventory.blocks for tensor in block.tensors):
        dtype = weights.dtype(tensor)
        if tensor.name not in splits:
            name, parts = weights.base.file_name(tensor.name), partial(weights.parts, tensor)
            found.append(TensorOut(name=name, dtype=dtype, shape=tensor.shape, parts=parts))
        for name in splits.get(tensor.name, ()):
            layout = saved.splits[name]
            parts = partial(weights.split_parts, layout)
            found.append(TensorOut(name=name, dtype=dtype, shape=layout.shape, parts=parts))
    kept = [
        *weights.base.kept,
        *(
            weights.base.file_name(b.name)
            for b in weights.inventory.buffers
            if b.name not in weights.base.missing_buffers
        ),
    ]
    for name in kept:
        spec = weights.base.kept_spec(name)
        parts = partial(weights.base.kept_parts, name)
        found.append(TensorOut(name=name, dtype=spec.dtype, shape=spec.shape, parts=parts))
    return found
