"""Load and check a run's model and data, before anything is allocated or written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.data import Packed, TokenDataset, load_tokenizer, open_dataset
from penstock.model.inventory import Inventory
from penstock.settings import Settings
from penstock.train.errors import ContextTooLongError
from penstock.train.events import Listeners, ReportProgress
from penstock.train.samples import Samples, load_samples

if TYPE_CHECKING:
    from penstock.data.batches import Batches


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The model to train, without its weights."""

    source: str
    """Where config, tokenizer and weights are: the user's model, or a checkpoint of the run."""
    config: Any
    inventory: Inventory


@dataclass(frozen=True, slots=True)
class TrainingData:
    """The data to train and evaluate on."""

    train: Packed
    held_out: Packed | None
    dataset: TokenDataset
    samples: Samples | None = None
    """Prompts to answer at each evaluation."""

    def batches(self, settings: Settings, position: Any = None) -> Batches:
        """Return the batches of the run, starting at a position in the data."""
        schedule = settings.schedule
        return self.train.batches(
            schedule.batch,
            epochs=schedule.epochs,
            steps=schedule.steps,
            seed=schedule.seed,
            position=position,
        )


def load_model(settings: Settings, checkpoint: Path | None) -> ModelSource:
    """Load the config of the model, and survey its blocks.

    A resumed run reads them from its checkpoint: the original model may be gone.
    """
    from penstock.engine.prepare import inspect_model
    from penstock.model.meta_model import check_trainable

    name, context = settings.model.model, settings.data.context
    source = str(checkpoint or name)
    chosen = settings if checkpoint is None else settings.replace({"revision": None})
    config, inventory = inspect_model(source, chosen, name=name)
    limit = inventory.max_context
    if limit is not None and context > limit:
        raise ContextTooLongError(name, wanted=context, limit=limit)
    check_trainable(inventory)
    return ModelSource(source, config, inventory)


def load_data(
    settings: Settings, model: ModelSource, listeners: Listeners, report: ReportProgress
) -> TrainingData:
    """Tokenize the data, or read it from the cache, and pack it into sequences."""
    seed, evaluation = settings.schedule.seed, settings.evaluation
    is_local = Path(model.source).is_dir()
    tokenizer = load_tokenizer(
        model.source,
        revision=None if is_local else settings.model.revision,
        trust_remote_code=settings.model.trust_remote_code,
    )
    dataset = everything = _open_dataset(settings.data.data, tokenizer, settings, report)
    held_out = None
    if evaluation.eval_split is not None:
        dataset, held_out = dataset.split(evaluation.eval_split, seed=seed)
    elif evaluation.eval_data:
        held_out = _open_dataset(evaluation.eval_data, tokenizer, settings, report)
    for note in everything.notes:
        listeners.note(f"note: {note}")
    if everything.bad_count:
        listeners.note(f"{everything.bad_count} lines skipped, first: {everything.bad_lines[0]}")
    mixer = model.inventory.mixes_documents
    packed = _pack(dataset, settings, one_per_row=bool(mixer))
    listeners.note(_describe(packed))
    if mixer:
        listeners.note(
            f"note: one document per sequence, {packed.counts.padding_share:.0%} padding: {mixer} "
            f"would carry information from one packed document to the next"
        )
    rows = None if held_out is None else _pack(held_out, settings, one_per_row=bool(mixer))
    return TrainingData(packed, rows, dataset, load_samples(settings, tokenizer))


def _open_dataset(
    sources: Sequence[str], tokenizer: Any, settings: Settings, report: ReportProgress
) -> TokenDataset:
    return open_dataset(
        list(sources),
        tokenizer,
        cache_dir=settings.data.cache,
        skip_bad_lines=settings.data.skip_bad_lines,
        on_progress=report,
    )


def _pack(dataset: TokenDataset, settings: Settings, *, one_per_row: bool) -> Packed:
    return dataset.pack(
        settings.data.context,
        overlong=settings.data.overlong,
        seed=settings.schedule.seed,
        one_per_row=one_per_row,
    )


def _describe(packed: Packed) -> str:
    counts = packed.counts
    return (
        f"{counts.documents:,} documents in {counts.rows:,} sequences of {packed.context:,} "
        f"tokens, {counts.targets:,} tokens trained"
    )
