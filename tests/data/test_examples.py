"""Records: Alpaca columns, ShareGPT turns, columns with other names, and preference pairs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.data import open_dataset, open_pairs
from penstock.data.errors import BadLinesError, DataError, EmptyDataError, NoChatTemplateError
from tests.data.helpers import chat, dataset_of, trained_text, whole_text, write_lines
from tests.support.small_tokenizers import small_tokenizer

USER, END = "<|im_start|>user\n", "<|im_end|>\n"
ASSISTANT = "<|im_start|>assistant\n"


def turns(*texts: str) -> str:
    roles = (USER, ASSISTANT)
    return "".join(roles[n % 2] + text + END for n, text in enumerate(texts))


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ({"instruction": "Add.", "input": "2 3", "output": "5"}, turns("Add.\n2 3", "5")),
        ({"instruction": "Hi", "input": "", "output": "Hello"}, turns("Hi", "Hello")),
        ({"instruction": "Hi", "output": "Hello", "category": "x"}, turns("Hi", "Hello")),
        (
            {"instruction": "Two", "output": "B", "history": [["One", "A"]]},
            turns("One", "A", "Two", "B"),
        ),
        (
            {"instruction": "Hi", "output": "Hello", "system": "Be kind."},
            "<|im_start|>system\nBe kind.<|im_end|>\n" + turns("Hi", "Hello"),
        ),
        (
            {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]},
            turns("Hi", "Ho"),
        ),
        (
            {"conversation": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]},
            turns("Hi", "Ho"),
        ),
        (
            {"prompt": "Hi", "completion": [{"role": "assistant", "content": "Ho"}]},
            turns("Hi", "Ho"),
        ),
        (
            {
                "system": "Be kind.",
                "prompt": [{"role": "user", "content": "Hi"}],
                "completion": [{"role": "assistant", "content": "Ho"}],
            },
            "<|im_start|>system\nBe kind.<|im_end|>\n" + turns("Hi", "Ho"),
        ),
        ({"messages": json.dumps(chat("Hi", "Ho")["messages"], indent=2)}, turns("Hi", "Ho")),
    ],
)
def test_common_records_are_chats(record: dict[str, Any], text: str, tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path, [record])

    assert whole_text(dataset) == text
    assert all(part.endswith("<|im_end|>") for part in trained_text(dataset))


@pytest.mark.parametrize(
    "answer",
    ['[{"name": "Ann", "age": 3}]', '[{"from": "Rome", "to": "Oslo"}]', '[{"role": "chair"}]'],
)
def test_a_prompt_or_completion_may_be_json(answer: str, tmp_path: Path) -> None:
    records = [{"prompt": "As JSON: ", "completion": answer}, {"prompt": answer, "completion": "x"}]
    dataset = dataset_of(tmp_path, records)

    assert [whole_text(dataset, n) for n in (0, 1)] == [
        f"As JSON: {answer}<|end|>", f"{answer}x<|end|>",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"instruction": "", "output": "x"}, "instruction is empty"),
        ({"instruction": "x", "output": 5}, "output must be a string"),
        ({"instruction": "x", "output": "y", "history": ["z"]}, "history must be a list of pairs"),
        ({"instruction": "x", "output": "y", "history": 5}, "history must be a list of pairs"),
        ({**chat("x", "y"), "system": ["z"]}, "system must be a string, got"),
        ({"chosen": "x", "rejected": "y"}, "preference pair.*--columns messages=chosen"),
        ({str(n): n for n in range(12)}, "has 0, 1, 2, 3, 4, 5, 6, 7, ...; expected"),
    ],
)
def test_what_is_not_understood_names_what_was_found(
    record: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(BadLinesError, match=words):
        dataset_of(tmp_path, [record])


def test_alpaca_without_a_chat_template_says_which_columns_to_use(tmp_path: Path) -> None:
    record = {"instruction": "Hi. ", "output": "Hello."}
    tokenizer = small_tokenizer(None)
    with pytest.raises(NoChatTemplateError, match="--columns prompt=instruction,completion=output"):
        dataset_of(tmp_path, [record], tokenizer)

    columns = {"prompt": "instruction", "completion": "output"}
    dataset = dataset_of(tmp_path, [record], tokenizer, columns=columns)

    assert trained_text(dataset) == ["Hello.<|end|>"]


def test_columns_have_other_names_and_all_others_are_ignored(tmp_path: Path) -> None:
    record = {"question": "Two?", "answer": "It is.", "text": "other", "messages": "none"}

    chats = dataset_of(tmp_path, [record], columns={"instruction": "question", "output": "answer"})
    plain = dataset_of(tmp_path, [record], columns={"text": "answer"})

    assert whole_text(chats) == turns("Two?", "It is.")
    assert whole_text(plain) == "It is.<|end|>"
    with pytest.raises(
        BadLinesError,
        match=r"has no column 'reply'; it has question, answer, text, messages \(--columns",
    ):
        dataset_of(tmp_path, [record], columns={"text": "reply"})
    with pytest.raises(DataError, match="'reply' has no meaning; the names are messages, text"):
        dataset_of(tmp_path, [record], columns={"reply": "text"})


def test_plain_text_has_no_columns(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", [{"body": "first"}])
    (tmp_path / "b.txt").write_text("second")
    files = [tmp_path / "a.jsonl", tmp_path / "b.txt"]

    dataset = open_dataset(files, small_tokenizer(), columns={"text": "body"},
                           cache_dir=tmp_path / "cache")  # fmt: skip

    assert [whole_text(dataset, n) for n in (0, 1)] == ["first<|end|>", "second<|end|>"]


# Weights.


def weighted(tmp_path: Path, *weights: float, seed: int = 0) -> list[str]:
    (tmp_path / "two").mkdir(exist_ok=True)
    write_lines(tmp_path / "a.jsonl", [{"text": f"a{n}"} for n in range(8)])
    write_lines(tmp_path / "two/b.jsonl", [{"text": f"b{n}"} for n in range(2)])
    write_lines(tmp_path / "two/c.jsonl", [{"text": f"b{n}"} for n in range(2, 4)])
    files = [tmp_path / "a.jsonl", tmp_path / "two"]
    dataset = open_dataset(files, small_tokenizer(), cache_dir=tmp_path / "cache")
    mixed = dataset.weighted(weights, seed=seed)
    return sorted(whole_text(mixed, n).removesuffix("<|end|>") for n in range(len(mixed)))


def test_a_weight_says_how_often_an_epoch_has_a_source(tmp_path: Path) -> None:
    everything = [f"a{n}" for n in range(8)], [f"b{n}" for n in range(4)]

    assert weighted(tmp_path, 1, 1) == everything[0] + everything[1]
    assert weighted(tmp_path, 0, 2) == sorted(everything[1] * 2)
    half = weighted(tmp_path, 0.5, 1.25)
    assert sum(text.startswith("a") for text in half) == len(set(half) & {*everything[0]}) == 4
    assert sum(text.startswith("b") for text in half) == 5
    assert half == weighted(tmp_path, 0.5, 1.25)
    assert half != weighted(tmp_path, 0.5, 1.25, seed=1)


@pytest.mark.parametrize("weights", [(1,), (1, 2, 3), (1, -1), (1, float("nan"))])
def test_wrong_weights_are_rejected(weights: tuple[float, ...], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the weights must be 2 numbers from 0 to 1000"):
        weighted(tmp_path, *weights)


def test_weights_that_leave_nothing_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(EmptyDataError, match="leave no document"):
        weighted(tmp_path, 0, 0)


def test_a_weight_that_leaves_nothing_of_a_source_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"0.1 leaves none of the 4 documents of source 2"):
        weighted(tmp_path, 1, 0.1)


def test_weights_are_part_of_a_saved_position(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path, [{"text": f"Water {n}."} for n in range(9)])

    identities = [
        d.pack(16).identity for d in (dataset, dataset.weighted([1]), dataset.weighted([2]))
    ]

    assert len({identity["part"] for identity in identities}) == 3


# Preference pairs.


def pairs_of(tmp_path: Path, records: list[Any], **options: Any) -> Any:
    file = write_lines(tmp_path / "pairs.jsonl", records)
    return open_pairs(file, small_tokenizer(), cache_dir=tmp_path / "cache", **options)


ASK = [{"role": "user", "content": "Two?"}]
YES, NO = ({"role": "assistant", "content": text} for text in ("It is.", "No."))


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "Two?", "chosen": [YES], "rejected": [NO]},
        {"prompt": "Two?", "chosen": [*ASK, YES], "rejected": [*ASK, NO]},
        {"prompt": ASK, "chosen": [YES], "rejected": [NO]},
        {"prompt": ASK, "chosen": [*ASK, YES], "rejected": [*ASK, NO]},
        {"chosen": [*ASK, YES], "rejected": [*ASK, NO]},
    ],
)
def test_a_pair_is_two_chats_with_trained_answers(record: dict[str, Any], tmp_path: Path) -> None:
    pairs = pairs_of(tmp_path, [record])

    assert len(pairs) == 1
    assert [trained_text(pairs.documents, n) for n in (0, 1)] == [
        ["It is.<|im_end|>"], ["No.<|im_end|>"],
    ]  # fmt: skip
    assert whole_text(pairs.documents, 1) == turns("Two?", "No.")


BRIEF = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    "record",
    [
        {"system": "Be brief.", "prompt": "Two?", "chosen": [YES], "rejected": [NO]},
        {"system": "Be brief.", "prompt": ASK, "chosen": [*ASK, YES], "rejected": [*ASK, NO]},
        {"system": "Be brief.", "chosen": [*ASK, YES], "rejected": [*ASK, NO]},
        {"prompt": "Two?", "chosen": [BRIEF, *ASK, YES], "rejected": [BRIEF, *ASK, NO]},
        {"prompt": [BRIEF, *ASK], "chosen": [BRIEF, *ASK, YES], "rejected": [NO]},
    ],
)
def test_a_pair_has_its_system_message_once(record: dict[str, Any], tmp_path: Path) -> None:
    pairs = pairs_of(tmp_path, [record])

    assert [whole_text(pairs.documents, n) for n in (0, 1)] == [
        "<|im_start|>system\nBe brief.<|im_end|>\n" + turns("Two?", said)
        for said in ("It is.", "No.")
    ]
    assert trained_text(pairs.documents, 0) == ["It is.<|im_end|>"]


def test_pairs_of_strings_need_no_chat_template(tmp_path: Path) -> None:
    record = {"prompt": "Two?", "yes": " It is.", "no": " No."}
    columns = {"prompt": "prompt", "chosen": "yes", "rejected": "no"}

    pairs = pairs_of(tmp_path, [record], columns=columns)

    chosen, rejected = pairs[0]
    assert pairs.documents.decode(chosen.ids) == "Two? It is.<|end|>"
    assert pairs.documents.decode(rejected.ids[rejected.trained]) == " No.<|end|>"


def test_a_pair_with_one_bad_side_is_one_bad_line(tmp_path: Path) -> None:
    records = [
        {"prompt": "a", "chosen": "b", "rejected": ""},
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"prompt": "a", "chosen": "b"},
        {"prompt": "", "chosen": "b", "rejected": "<|end|>"},  # its only token is never trained
    ]
    with pytest.raises(BadLinesError, match=r"pairs.jsonl:3: has prompt, chosen; expected") as bad:
        pairs_of(tmp_path, records)
    assert bad.value.count == 3

    pairs = pairs_of(tmp_path, records, skip_bad_lines=True)
    assert (len(pairs), len(pairs.documents)) == (1, 2)


def test_a_batch_of_pairs_has_the_chosen_rows_first(tmp_path: Path) -> None:
    records = [{"prompt": f"{n}?", "chosen": " yes", "rejected": " no no"} for n in range(5)]
    pairs = pairs_of(tmp_path, records)

    batches = list(pairs.batches(2, context=16, seed=3))

    assert [len(batch["input_ids"]) for batch in batches] == [4, 4, 2]
    decode = pairs.documents.decode
    for batch in batches:
        rows = len(batch["labels"]) // 2
        said = [decode(row[row >= 0]) for row in batch["labels"]]
        assert said == [" yes<|end|>"] * rows + [" no no<|end|>"] * rows
        prompts = [decode(ids).split(" ")[0] for ids in batch["input_ids"]]
        assert prompts[:rows] == prompts[rows:]
        assert (batch["position_ids"][:, 0] == 0).all()
    with pytest.raises(DataError, match=r"the longest pair has .* tokens, more than the 4"):
        next(pairs.batches(2, context=4))


def test_a_chat_is_not_a_pair(tmp_path: Path) -> None:
    with pytest.raises(BadLinesError, match="has messages; expected chosen and rejected"):
        pairs_of(tmp_path, [chat("a", "b")])
