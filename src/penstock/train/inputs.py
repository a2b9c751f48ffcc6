"""Load and check a run's model and data, before anything is allocated or written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.data import Packed, TokenDataset, load_tokenizer, open_dataset
from penstock.errors import SurveyError
from penstock.model.inventory import Inventory
from penstock.settings import Overlong, Settings
from penstock.train.errors import BareModelError, ContextTooLongError
from penstock.train.events import ReportProgress
from penstock.train.samples import Samples, load_samples
from penstock.train.sizes import choose_batch, choose_context

if TYPE_CHECKING:
    from penstock.data.batches import Batches

CUT_WARNING = 0.05
"""Share of the trained tokens that may be cut before the message about it is a warning."""

Note = Callable[[str], None]
"""Called with a sentence for the user."""


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
            schedule.chosen_batch,
            epochs=schedule.epochs,
            steps=schedule.steps,
            seed=schedule.seed,
            position=position,
        )


def load_model(settings: Settings, checkpoint: Path | None) -> ModelSource:
    """Load the config of the model, and survey its blocks.

    A resumed run reads them from its checkpoint: the original model may be gone. The checkpoints of
    an adapter have no frozen weights, and no config: both are those of the original model.
    """
    from penstock.engine.model_source import inspect_model
    from penstock.model.freeze import check_freeze
    from penstock.model.meta_model import check_trainable

    name, context = settings.model.model, settings.data.context
    whole = checkpoint if not settings.model.lora else None
    source = str(whole or name)
    chosen = settings if whole is None else settings.replace({"revision": None})
    try:
        config, inventory = inspect_model(source, chosen, name=name)
    except SurveyError as wrong:
        if checkpoint is not None and whole is None and not Path(name).exists():
            out = settings.checkpoint.out
            wrong.add_note(
                f"it is the base model of the adapter in {out}. Put it back, or name it where it "
                f"is now: penstock train MODEL --out {out} --resume"
            )
        raise
    limit = inventory.max_context
    if limit is not None and context is not None and context > limit:
        where = name if whole is None else str(whole / "config.json")
        raise ContextTooLongError(where, wanted=context, limit=limit)
    check_trainable(inventory)
    # After the reasons for which no weights would help, which `penstock plan` gives as well.
    if whole is None and settings.model.init == "pretrained":
        _check_weights_exist(Path(name))
    if checkpoint is None:  # a resumed run freezes what it froze before
        check_freeze(inventory, settings.model.freeze)
    return ModelSource(source, config, inventory)


def _check_weights_exist(folder: Path) -> None:
    """Raise BareModelError for a directory that has only a config, before data is tokenized."""
    if not (folder / "config.json").is_file():
        return
    if not any(folder.glob("*.safetensors*")) and not any(folder.glob("*.bin")):
        raise BareModelError(str(folder))


def prepare_arguments(settings: Settings, *, resumed: bool) -> dict[str, Any]:
    """Return the arguments of `prepare` that differ for a resumed run.

    It reads config and weights from the checkpoint, which has no revision.
    """
    arguments: dict[str, Any] = {"init": "none"} if resumed else {}
    return arguments | {"revision": None} if resumed and not settings.model.lora else arguments


def load_data(
    settings: Settings, model: ModelSource, note: Note, report: ReportProgress
) -> tuple[Settings, TrainingData]:
    """Tokenize the data, or read it from the cache, and pack it into sequences.

    Returns the settings with the context and the batch that were chosen for the data, unless they
    were given, and the data. `note` is called with sentences for the user.
    """
    seed, evaluation = settings.schedule.seed, settings.evaluation
    report = _note_messages(report, note)
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
    if settings.data.data_weights:
        dataset = dataset.weighted(settings.data.data_weights, seed=seed)
    _note_problems(everything, note)
    mixer = model.inventory.mixes_documents
    chosen, packed = _with_sizes(settings, dataset, model)
    for text in describe_data(settings, chosen, packed):
        note(text)
    if mixer:
        note(
            f"note: one document per sequence, {packed.counts.padding_share:.0%} padding: {mixer} "
            f"would carry information from one packed document to the next"
        )
    rows = None if held_out is None else _pack(held_out, chosen, one_per_row=bool(mixer))
    if held_out is not None and rows is not None:
        if evaluation.eval_data:  # otherwise, a part of what was noted above
            _note_problems(held_out, note, "evaluation data: ")
        if cut := describe_cut(rows, chosen.data.overlong, held_out=True):
            note(cut)
    return chosen, TrainingData(packed, rows, dataset, load_samples(chosen, tokenizer))


def _note_problems(dataset: TokenDataset, note: Note, prefix: str = "") -> None:
    """Note what is unusual about the documents, and lines that were skipped."""
    for text in dataset.notes:
        note(f"note: {prefix}{text}")
    if dataset.bad_count:
        note(f"{prefix}{dataset.bad_count} lines skipped, first: {dataset.bad_lines[0]}")


def _note_messages(report: ReportProgress, note: Note) -> ReportProgress:
    """Pass messages, which have no total, to `note`, where they are not overwritten."""

    def report_or_note(done: int, total: int, text: str) -> None:
        if total:
            report(done, total, text)
        else:
            note(text)

    return report_or_note


def _with_sizes(
    settings: Settings, dataset: TokenDataset, model: ModelSource
) -> tuple[Settings, Packed]:
    """Choose the context and the batch, if they are not given, and pack the data."""
    one_per_row = bool(model.inventory.mixes_documents)
    if settings.data.context is None:
        context = choose_context(
            dataset,
            max_context=model.inventory.max_context,
            batch=settings.schedule.batch,
            one_per_row=one_per_row,
        )
        settings = settings.replace({"context": context})
    packed = _pack(dataset, settings, one_per_row=one_per_row)
    if settings.schedule.batch is None:
        settings = settings.replace({"batch": choose_batch(packed)})
    return settings, packed


def _open_dataset(
    sources: Sequence[str], tokenizer: Any, settings: Settings, report: ReportProgress
) -> TokenDataset:
    return open_dataset(
        list(sources),
        tokenizer,
        columns=settings.data.column_names,
        streaming=settings.data.streaming,
        cache_dir=settings.data.cache,
        skip_bad_lines=settings.data.skip_bad_lines,
        on_progress=report,
    )


def _pack(dataset: TokenDataset, settings: Settings, *, one_per_row: bool) -> Packed:
    return dataset.pack(
        settings.data.chosen_context,
        overlong=settings.data.overlong,
        seed=settings.schedule.seed,
        one_per_row=one_per_row,
    )


def describe_data(given: Settings, chosen: Settings, packed: Packed) -> list[str]:
    """Say how the data is cut into sequences and steps, and what of it is not trained."""
    counts, batch = packed.counts, chosen.schedule.chosen_batch
    by_itself = [
        f"{name} {value:,}"
        for name, value, setting in (
            ("context", packed.context, given.data.context),
            ("batch", batch, given.schedule.batch),
        )
        if setting is None
    ]
    chosen_text = f"; chosen for this data: {' and '.join(by_itself)}" if by_itself else ""
    documents, rows = _count(counts.documents, "document"), _count(counts.rows, "sequence")
    steps = _count(packed.steps_per_epoch(batch), "step")
    lines = [
        f"{documents} in {rows} of {packed.context:,} tokens, {counts.targets:,} tokens trained; "
        f"{steps} per epoch with a batch of {batch:,}{chosen_text}"
    ]
    return [*lines, *filter(None, [describe_cut(packed, chosen.data.overlong)])]


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def describe_cut(packed: Packed, overlong: Overlong, *, held_out: bool = False) -> str:
    """Say how much was cut from documents that are longer than the context; "" if nothing was.

    `held_out` says that the data is only evaluated.
    """
    counts = packed.counts
    number = counts.truncated + counts.dropped
    if not number:
        return ""
    verb = "dropped" if overlong == "drop" else "truncated"
    total = counts.cut + counts.targets
    used, uses = ("evaluated", "evaluates") if held_out else ("trained", "trains on")
    documents = "evaluation documents" if held_out else "documents"
    return (
        f"{'warning' if counts.cut_share > CUT_WARNING else 'note'}: {number:,} of "
        f"{counts.documents:,} {documents} are longer than the context of {packed.context:,} "
        f"tokens and are {verb}: {counts.cut:,} of {total:,} {used} tokens "
        f"({counts.cut_share:.1%}) are left out. --overlong split {uses} them in pieces, and a "
        f"larger --context keeps them whole"
    )
