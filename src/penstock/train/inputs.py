"""A run's model and data, found and checked before anything is taken. Room: show."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.data import Packed, TokenDataset, load_tokenizer, open_dataset
from penstock.model.inventory import Inventory
from penstock.settings import Settings
from penstock.train.errors import ContextTooLongError
from penstock.train.events import Listeners
from penstock.train.samples import Samples, find_samples

if TYPE_CHECKING:
    from penstock.data.batches import Batches

Tell = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Model:
    """What is to be trained, without its weights."""

    source: str
    """Where config, tokenizer and weights are: the user's model, or a checkpoint of the run."""
    config: Any
    inventory: Inventory


@dataclass(frozen=True, slots=True)
class Data:
    """What it is trained on."""

    train: Packed
    held_out: Packed | None
    dataset: TokenDataset
    samples: Samples | None = None
    """Prompts that are answered at each evaluation."""

    def batches(self, settings: Settings, position: Any = None) -> Batches:
        """In order, from the position on."""
        return self.train.batches(
            settings.schedule.batch,
            epochs=settings.schedule.epochs,
            steps=settings.schedule.steps,
            seed=settings.schedule.seed,
            position=position,
        )


def find_model(settings: Settings, checkpoint: Path | None) -> Model:
    """From the checkpoint that is resumed, where there is one: the original may be gone."""
    from penstock.engine.prepare import inspect_model
    from penstock.model.skeleton import check_trainable

    source = str(checkpoint or settings.model.model)
    chosen = settings if checkpoint is None else settings.replace({"revision": None})
    config, inventory = inspect_model(source, chosen, name=settings.model.model)
    limit = inventory.max_context
    if limit is not None and settings.data.context > limit:
        raise ContextTooLongError(settings.model.model, wanted=settings.data.context, limit=limit)
    check_trainable(inventory)
    return Model(source, config, inventory)


def find_data(settings: Settings, model: Model, listeners: Listeners, tell: Tell) -> Data:
    """Tokenized now, or found in the cache."""
    local = Path(model.source).is_dir()
    tokenizer = load_tokenizer(
        model.source,
        revision=None if local else settings.model.revision,
        trust_remote_code=settings.model.trust_remote_code,
    )
    dataset = _open(settings.data.data, tokenizer, settings, tell)
    held_out = None
    whole = dataset
    if settings.evaluation.eval_split is not None:
        dataset, held_out = dataset.split(
            settings.evaluation.eval_split, seed=settings.schedule.seed
        )
    elif settings.evaluation.eval_data:
        held_out = _open(settings.evaluation.eval_data, tokenizer, settings, tell)
    for note in whole.notes:
        listeners.note(f"note: {note}")
    if whole.bad_count:
        listeners.note(f"{whole.bad_count} lines were left out, first: {whole.bad_lines[0]}")
    packed = dataset.pack(
        settings.data.context, overlong=settings.data.overlong, seed=settings.schedule.seed
    )
    listeners.note(_about(packed))
    rows = None
    if held_out is not None:
        rows = held_out.pack(
            settings.data.context, overlong=settings.data.overlong, seed=settings.schedule.seed
        )
    return Data(packed, rows, dataset, find_samples(settings, tokenizer))


def _open(sources: Sequence[str], tokenizer: Any, settings: Settings, tell: Tell) -> TokenDataset:
    skip = settings.data.skip_bad_lines
    return open_dataset(
        list(sources), tokenizer, cache_dir=settings.data.cache, skip_bad_lines=skip, tell=tell
    )


def _about(packed: Packed) -> str:
    counts = packed.counts
    return (
        f"{counts.documents:,} documents in {counts.rows:,} sequences of {packed.context:,} "
        f"tokens, {counts.targets:,} tokens trained"
    )


def companions_directory(settings: Settings, model: Model) -> Path:
    """Where the small files are; of the hub, fetched, without weights if none are wanted."""
    from penstock.engine.prepare import model_directory

    if Path(model.source).is_dir():
        return Path(model.source)
    if settings.model.init == "pretrained":
        return model_directory(model.source, settings.model.revision)
    from huggingface_hub import snapshot_download

    small = ["*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken"]
    return Path(
        snapshot_download(model.source, revision=settings.model.revision, allow_patterns=small)
    )
