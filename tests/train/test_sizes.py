"""Context and batch are chosen for the data, said, planned, recorded and kept by a resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.data import TokenDataset
from penstock.settings import read_yaml
from penstock.train.errors import NoUpdateError
from penstock.train.loop import TrainingLoop
from penstock.train.sizes import choose_batch, choose_context
from tests.data.helpers import chat, dataset_of, write_lines
from tests.support.manifests import make_old_manifest
from tests.train.runs import RESIDENT, make_model, run_command

WORD = "water "


def chats(tmp_path: Path, count: int, words: int = 10) -> TokenDataset:
    return dataset_of(tmp_path, [chat(f"{n}?", WORD * words) for n in range(count)])


def choose(dataset: TokenDataset, limit: int | None = 1 << 17) -> tuple[int, int, int]:
    """Return the context, the batch and the steps per epoch."""
    context = choose_context(dataset, max_context=limit, batch=None, one_per_row=False)
    packed = dataset.pack(context)
    batch = choose_batch(packed)
    return context, batch, packed.steps_per_epoch(batch)


@pytest.mark.parametrize(("count", "steps"), [(1, 1), (3, 3), (50, 25), (400, 40)])
def test_a_small_data_set_has_as_many_steps_as_it_can(
    count: int, steps: int, tmp_path: Path
) -> None:
    context, batch, found = choose(chats(tmp_path, count, words=30))

    assert found >= steps
    assert batch == 1
    assert context % 64 == 0


def test_a_large_data_set_has_steps_of_32768_tokens(tmp_path: Path) -> None:
    context, batch, steps = choose(dataset_of(tmp_path, [{"text": WORD * 60_000}] * 28))

    assert (context, batch) == (4096, 8)
    assert steps > 50


def test_the_context_fits_the_longest_chat_up_to_the_models_limit(tmp_path: Path) -> None:
    dataset = chats(tmp_path, 3, words=5000)
    longest = int(dataset.lengths.max())

    context, _, _ = choose(dataset)
    assert longest <= context < longest + 64
    assert dataset.pack(context).counts.cut == 0
    assert choose(dataset, limit=1000)[0] == 1000


def test_a_long_plain_text_does_not_make_the_context_long(tmp_path: Path) -> None:
    context, batch, steps = choose(dataset_of(tmp_path, [{"text": WORD * 100_000}]))

    assert context <= 4096
    assert batch == 1
    assert steps >= 50


def test_a_given_batch_makes_the_context_shorter(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path, [{"text": WORD * 1000} for _ in range(50)])

    chosen = [
        choose_context(dataset, max_context=None, batch=batch, one_per_row=False)
        for batch in (1, 2, 100)
    ]

    assert chosen[0] > chosen[1] > chosen[2] >= 512


def test_without_packing_the_context_is_that_of_the_longest_document(tmp_path: Path) -> None:
    dataset = chats(tmp_path, 5000, words=20)

    context = choose_context(dataset, max_context=None, batch=None, one_per_row=True)

    assert context < int(dataset.lengths.max()) + 64


# Whole runs with defaults.


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), max_position_embeddings=256)


def arguments(tmp_path: Path, model: Path, records: list[object], *more: str) -> list[str]:
    data = write_lines(tmp_path / "data.jsonl", records)
    return [str(model), "--data", str(data), "--cache", str(tmp_path / "cache"), *RESIDENT, *more]


def test_all_defaults_train_and_record_what_they_chose(model: Path, tmp_path: Path) -> None:
    records = [chat(f"{n}?", f"{n} {WORD}") for n in range(8)]
    flags = arguments(tmp_path, model, records)
    out = tmp_path / "out"

    done = run_command(["train", *flags, "--out", str(out), "--json"])
    planned = run_command(
        ["plan", *flags, "--machine", "this", "-o", str(tmp_path / "plan.json"), "--json"]
    )

    assert done.code == 0, done.errors
    assert min(event["lr"] for event in done.of("step")) > 0
    assert (out / "model.safetensors").read_bytes() != (model / "model.safetensors").read_bytes()
    recorded = read_yaml(out / "run.yaml")
    (plan,) = done.of("plan")
    assert (plan["context"], plan["batch"]) == (recorded["context"], recorded["batch"]) == (64, 1)
    assert "chosen for this data: context 64 and batch 1" in done.errors
    assert planned.code == 0, planned.errors
    assert "chosen for this data: context 64 and batch 1" in planned.errors
    assert (tmp_path / "plan.json").read_bytes() == (out / "plan.json").read_bytes()


def test_a_plan_without_data_says_what_it_assumes(model: Path) -> None:
    flags = ["plan", str(model), "--machine", "this", *RESIDENT, "--json"]

    assert "Assumed: context 256 and batch 8" in run_command(flags).errors
    assert "Assumed: batch 8." in run_command([*flags, "--context", "64"]).errors
    assert "Assumed" not in run_command([*flags, "--context", "64", "--batch", "2"]).errors


def test_what_is_cut_is_printed_before_the_first_step(model: Path, tmp_path: Path) -> None:
    long = chat("Hello?", WORD * 600)
    flags = arguments(tmp_path, model, [long, *[chat("Hello?", WORD)] * 3])
    cut = ["--context", "128", "--steps", "1", "--out", str(tmp_path / "out")]

    done = run_command(["train", *flags, *cut])

    assert done.code == 0, done.errors
    at = done.output.index("warning: 1 of 4 documents are longer than the context of 128 tokens")
    assert at < done.output.index("step 1/1")
    assert "--overlong split" in done.output


def test_what_is_cut_is_also_reported_from_the_cache_and_of_the_evaluation_data(
    model: Path, tmp_path: Path
) -> None:
    """A resume of the finished run reads the same cache, and says how to continue."""
    long = chat("Hello?", WORD * 600)
    flags = arguments(tmp_path, model, [long, *[chat("Hello?", WORD)] * 3])
    held_out = tmp_path / "held-out.jsonl"
    held_out.write_text(f"{json.dumps(long)}\nbroken\n{json.dumps(chat('Hello?', WORD))}\n")
    out = ["--out", str(tmp_path / "out"), "--cache", str(tmp_path / "cache")]
    more = ["--eval-data", str(held_out), "--skip-bad-lines", "--context", "128", "--steps", "1"]

    first = run_command(["train", *flags, *more, *out])
    again = run_command(["train", *out, "--resume"])

    for done in (first, again):
        assert done.code == 0, done.errors
        assert "warning: 1 of 4 documents are longer than the context of 128" in done.output
        assert "warning: 1 of 2 evaluation documents are longer than" in done.output
        assert "evaluated tokens" in done.output
        assert "evaluation data: 1 lines skipped, first: " in done.output
    assert "is finished" not in first.output
    assert "is finished after 1 step. To train longer" in again.output
    assert "for example --resume --steps 2" in again.output


def test_a_run_with_more_steps_than_its_settings_says_how_to_train_longer(
    model: Path, tmp_path: Path
) -> None:
    flags = arguments(tmp_path, model, [chat("Hello?", WORD)] * 3)
    out = ["--out", str(tmp_path / "out"), "--cache", str(tmp_path / "cache")]

    assert run_command(["train", *flags, *out, "--context", "64", "--steps", "3"]).code == 0
    again = run_command(["train", *out, "--resume", "--steps", "1"])

    assert again.code == 0, again.errors
    assert "finished after 3 steps, which is more than the 1 of these settings" in again.output
    assert "for example --resume --steps 6" in again.output


def test_little_that_is_cut_is_a_note(model: Path, tmp_path: Path) -> None:
    long = chat("Hello?", WORD * 90)
    flags = arguments(tmp_path, model, [long, *[chat("Hello?", WORD * 70)] * 30])

    done = run_command(["plan", *flags, "--context", "256", "--machine", "this", "--json"])

    assert "note: 1 of 31 documents are longer" in done.errors


def test_a_resume_keeps_the_schedule_and_the_sizes_of_a_run_of_an_earlier_version(
    model: Path, tmp_path: Path
) -> None:
    """Its checkpoint does not say that warmup begins at 0, and here its run.yaml is missing."""
    out = tmp_path / "out"
    flags = arguments(tmp_path, model, [chat(f"{n}?", WORD) for n in range(8)])
    more = ["--warmup", "4", "--lr", "1e-3", "--out", str(out)]
    first = [*more, "--context", "128", "--batch", "2", "--overlong", "truncate"]
    assert run_command(["train", *flags, *first, "--steps", "2", "--json"]).code == 0
    (out / "run.yaml").unlink()
    state = out / "checkpoint-000002/training_state.json"
    record = json.loads(state.read_text())
    assert record["schedule"].pop("from_zero") is False
    state.write_text(json.dumps(record))
    make_old_manifest(state.parent)

    done = run_command(["train", *flags, *more, "--steps", "6", "--resume", "--json"])

    assert done.code == 0, done.errors
    rates = {event["step"]: event["lr"] for event in done.of("step")}
    assert rates[3] == pytest.approx(1e-3 * 2 / 4)
    assert (done.of("plan")[0]["context"], done.of("plan")[0]["batch"]) == (128, 2)
    assert "overlong was" not in done.errors


def test_columns_and_weights_of_several_sources(model: Path, tmp_path: Path) -> None:
    questions = [{"question": f"{n}?", "answer": f"{n} {WORD}"} for n in range(4)]
    flags = arguments(tmp_path, model, questions, "--columns", "instruction=question,output=answer")
    more = tmp_path / "more.csv"
    more.write_text("question;answer\n" + "".join(f"{n}!;{WORD}\n" for n in range(10)))
    flags += ["--data", str(more), "--out", str(tmp_path / "out"), "--json"]

    done = run_command(["train", *flags, "--data-weights", "2,0.5"])

    assert done.code == 0, done.errors
    assert "13 documents in" in done.errors  # 2 x 4 + 0.5 x 10
    recorded = read_yaml(tmp_path / "out/run.yaml")
    assert recorded["columns"] == ["instruction=question", "output=answer"]
    assert recorded["data_weights"] == [2.0, 0.5]
    again = run_command(["train", "--out", str(tmp_path / "out"), "--resume", "--json"])
    assert again.code == 0, again.errors
    wrong = run_command(["train", *flags, "--data-weights", "1"])
    assert wrong.code == 2
    assert "must be one number for each of the 2" in wrong.errors


def test_messages_about_a_directory_are_printed(model: Path, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/photo.png").write_bytes(b"")
    write_lines(tmp_path / "folder/data.jsonl", [chat("Hello?", WORD)])
    flags = [str(model), *RESIDENT, "--data", str(tmp_path / "folder")]
    flags += ["--cache", str(tmp_path / "cache")]

    planned = run_command(["plan", *flags, "--machine", "this", "--json"])
    trained = run_command(["train", *flags, "--out", str(tmp_path / "out")])

    for printed in (planned.errors, trained.output):
        assert "not read: photo.png. Penstock reads" in printed
        assert "1 document in 1 sequence of 64 tokens" in printed


# Runs that would change nothing.


def test_a_learning_rate_of_0_is_refused_before_the_model_is_read(tmp_path: Path) -> None:
    flags = arguments(tmp_path, Path("gone"), [], "--lr", "0", "--out", str(tmp_path / "out"))

    refused = run_command(["train", *flags])

    assert refused.code == 1
    assert "lr: must be greater than 0: no step would change a weight" in refused.errors


def test_a_run_without_an_update_is_an_error(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_step = TrainingLoop._take_step

    def without_gradient(self: TrainingLoop) -> None:
        before = self._has_updated
        take_step(self)
        assert self._has_updated
        self._has_updated = before  # as if every gradient were zero

    monkeypatch.setattr(TrainingLoop, "_take_step", without_gradient)
    flags = arguments(tmp_path, model, [chat("Hello?", WORD)] * 3, "--out", str(tmp_path / "out"))

    failed = run_command(["train", *flags, "--json"])

    assert failed.code == 1
    assert "no step changed a weight: the gradient was zero in all" in failed.errors
    assert failed.of("done") == []
    assert not (tmp_path / "out/model.safetensors").exists()
    skipped = str(NoUpdateError("out", steps=4, skipped=4))
    assert "4 of 4 were skipped because a loss or gradient was not finite" in skipped
