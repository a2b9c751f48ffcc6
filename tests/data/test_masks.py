"""What is trained: the assistant's turns with their ends, and nothing else, or an error."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.data.encode import encode
from penstock.data.errors import BadLinesError, NoChatTemplateError, TokenizerError
from penstock.data.sources import Item, Place
from penstock.data.tokenizer import Tokens
from tests.data.making import chat, dataset_of, trained_text, whole_text
from tests.support import small_tokenizers as small
from tests.support.small_tokenizers import small_tokenizer

TALK = chat("What is two?", "It is two.", "And three?", "That is three.", system="Be brief.")
TURNS = ["It is two.<|im_end|>", "That is three.<|im_end|>"]


@pytest.mark.parametrize("template", [small.PLAIN, small.MARKED], ids=["unmarked", "marked"])
def test_the_assistants_turns_are_trained_with_their_ends(template: str, tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path, [TALK], small_tokenizer(template))

    assert trained_text(dataset) == TURNS
    assert whole_text(dataset) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nWhat is two?<|im_end|>\n<|im_start|>assistant\nIt is two.<|im_end|>\n"
        "<|im_start|>user\nAnd three?<|im_end|>\n<|im_start|>assistant\nThat is three.<|im_end|>\n"
    )


def test_marks_give_what_transformers_gives(tmp_path: Path) -> None:
    tokenizer = small_tokenizer(small.MARKED)
    dataset = dataset_of(tmp_path, [TALK], tokenizer)

    theirs = tokenizer.apply_chat_template(
        TALK["messages"], return_dict=True, return_assistant_tokens_mask=True
    )

    assert dataset[0].ids.tolist() == theirs["input_ids"]
    assert dataset[0].trained.astype(int).tolist() == theirs["assistant_masks"]


def test_a_last_turn_written_otherwise_does_not_confuse_those_before_it(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path, [TALK], small_tokenizer(small.THINKING))

    assert trained_text(dataset) == [TURNS[0], "<think>\n\n</think>\n\n" + TURNS[1]]


@pytest.mark.parametrize("template", [small.FORGETFUL, small.NO_INVITATION])
def test_a_template_that_is_no_prefix_of_itself_is_refused(template: str, tmp_path: Path) -> None:
    with pytest.raises(BadLinesError, match=r"data.jsonl:1: .*cannot be found.*generation") as told:
        dataset_of(tmp_path, [TALK], small_tokenizer(template))
    assert told.value.count == 1


MISPLACED = (
    "{% set answer %}{% generation %}{{ messages[1]['content'] }}{% endgeneration %}{% endset %}"
    "{{ messages[0]['content'] + ' -> ' + answer }}"
)
ONCE = small.MARKED.replace("== 'assistant' %}", "== 'assistant' and loop.last %}")


@pytest.mark.parametrize(
    ("template", "words"),
    [(MISPLACED, "does not hold its words"), (ONCE, "marks 1 spans for 2 assistant's turns")],
)
def test_marks_that_miss_the_words_are_refused(template: str, words: str, tmp_path: Path) -> None:
    talk = chat("A question.", "An answer.") if template is MISPLACED else TALK
    with pytest.raises(BadLinesError, match=words):
        dataset_of(tmp_path, [talk], small_tokenizer(template))


def test_marks_that_leave_the_end_of_the_turn_out_are_told(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path, [TALK], small_tokenizer(small.OPEN_ENDED))

    assert trained_text(dataset) == ["It is two.", "That is three."]
    assert "will not learn to stop" in dataset.notes[0]


def test_the_question_is_tokens_of_its_own_where_words_would_merge(tmp_path: Path) -> None:
    """`assistant: ` and `the` are ` the` in one go; the model is asked with the blank alone."""
    tokenizer = small_tokenizer(small.PROSE)
    dataset = dataset_of(tmp_path, [chat("Which?", "the pipe")], tokenizer)
    asked = tokenizer("user: Which?\nassistant: ")["input_ids"]

    ids = dataset[0].ids.tolist()
    assert ids[: len(asked)] == asked
    assert trained_text(dataset) == ["the pipe\n"]
    assert ids != tokenizer("user: Which?\nassistant: the pipe\n")["input_ids"]


def metaspace_tokenizer() -> Any:
    """One that puts a blank before every text it is given, as Llama 2's does."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>", "</s>"], show_progress=False
    )
    tokenizer.train_from_iterator([small.WORDS] * 20, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


def test_a_blank_that_the_tokenizer_adds_to_every_text_moves_no_border(tmp_path: Path) -> None:
    tokenizer = metaspace_tokenizer()
    record = {"prompt": "Which pipe?</s>", "completion": "the capital"}
    dataset = dataset_of(tmp_path, [record], tokenizer)

    whole = tokenizer("Which pipe?</s>the capital")["input_ids"]
    asked = tokenizer("Which pipe?</s>")["input_ids"]
    assert tokenizer("the capital")["input_ids"] != whole[len(asked) :]  # parts would mislead
    assert dataset[0].ids.tolist() == [*whole, tokenizer.eos_token_id]
    assert dataset[0].trained.tolist() == [n >= len(asked) for n in range(len(whole) + 1)]


def test_a_border_inside_a_token_that_cannot_be_parted_is_refused(tmp_path: Path) -> None:
    record = {"prompt": "the capital of It", "completion": "aly"}
    with pytest.raises(BadLinesError, match="a token lies across its border, near"):
        dataset_of(tmp_path, [record], metaspace_tokenizer())


def test_turns_of_weight_zero_and_of_the_prompt_are_masked(tmp_path: Path) -> None:
    talk = chat("What is two?", "It is two.", "And three?", "That is three.")
    talk["messages"][1]["weight"] = 0
    turns = chat("What is two?", "It is two.", "And three?", "That is three.")["messages"]
    split = {"prompt": turns[:3], "completion": turns[3:]}
    dataset = dataset_of(tmp_path, [talk, split])

    assert trained_text(dataset, 0) == trained_text(dataset, 1) == [TURNS[1]]


def test_spellings_of_sharegpt_are_understood(tmp_path: Path) -> None:
    said = [("system", "Be brief."), ("human", "What is two?"), ("gpt", "It is two.")]
    shared = {"conversations": [{"from": who, "value": what} for who, what in said]}
    apart = {"system": "Be brief.", "conversations": shared["conversations"][1:]}
    ours = chat("What is two?", "It is two.", system="Be brief.")
    dataset = dataset_of(tmp_path, [shared, apart, ours])

    assert whole_text(dataset, 0) == whole_text(dataset, 1) == whole_text(dataset, 2)
    assert trained_text(dataset) == [TURNS[0]]


def test_of_a_completion_all_but_the_prompt_is_trained(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path, [{"prompt": "two plus three is", "completion": " five"}])

    assert trained_text(dataset) == [" five<|end|>"]
    assert whole_text(dataset) == "two plus three is five<|end|>"


def test_a_text_is_trained_from_end_to_end(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path, [{"text": "Water runs down."}])

    assert trained_text(dataset) == ["Water runs down.<|end|>"]


def test_tokens_that_open_a_text_are_put_before_it_and_masked(tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = small_tokenizer()
    start = tokenizer.convert_tokens_to_ids("<|im_start|>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", start)]
    )
    dataset = dataset_of(tmp_path, [{"text": "Water"}, chat("Hello!", "Hello!")], tokenizer)

    assert whole_text(dataset, 0) == "<|im_start|>Water<|end|>"
    assert trained_text(dataset, 0) == ["Water<|end|>"]
    assert whole_text(dataset, 1).count("<|im_start|>") == 2  # the template's own, and no other


def test_no_chat_template_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(NoChatTemplateError, match=r"data.jsonl:1 is a chat.*chat_template.jinja"):
        dataset_of(tmp_path, [TALK], small_tokenizer(None))


def test_texts_need_a_token_to_end_with(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="no eos_token"):
        dataset_of(tmp_path, [{"text": "Water"}], small_tokenizer(eos_token=None))


def test_tools_go_to_a_template_that_writes_them_and_are_refused_by_one_that_does_not(
    tmp_path: Path,
) -> None:
    talk = {**chat("What is two?", "It is two."), "tools": [{"name": "add"}]}
    with pytest.raises(BadLinesError, match="has tools, which the chat template does not write"):
        dataset_of(tmp_path, [talk])

    writes = "{% for tool in tools or [] %}{{ tool['name'] }};{% endfor %}" + small.PLAIN
    dataset = dataset_of(tmp_path, [talk], small_tokenizer(writes))
    assert whole_text(dataset).startswith("add;<|im_start|>user")
    assert trained_text(dataset) == [TURNS[0]]


WORDS = st.text(
    st.characters(codec="utf-8", exclude_characters="<|"), min_size=1, max_size=30
) | st.sampled_from(["\n\n", " the", "the ", " \n x", "É", "日本"])
TALKS = st.lists(WORDS, min_size=2, max_size=6).map(lambda turns: turns[: len(turns) // 2 * 2])


@functools.cache
def tokens_of(template: str) -> Tokens:
    return Tokens(small_tokenizer(template))


@settings(max_examples=100, deadline=None)
@given(turns=TALKS, template=st.sampled_from([small.PLAIN, small.MARKED, small.PROSE]))
def test_what_is_trained_is_what_the_assistant_said(turns: list[str], template: str) -> None:
    """Whatever the words: blanks, line ends, letters of several bytes."""
    tokens = tokens_of(template)
    item = Item("here", chat(*turns), Place())

    (document,) = encode([item], tokens).documents

    end = "\n" if template == small.PROSE else "<|im_end|>"
    runs: list[list[int]] = [[]]
    for token, is_trained in zip(document.ids.tolist(), document.trained.tolist(), strict=True):
        if is_trained:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    said = [turn + end for turn in turns[1::2]]
    assert [tokens.decode(run) for run in runs if run] == said
    assert not document.trained[0]


@settings(max_examples=100, deadline=None)
@given(prompt=WORDS, completion=WORDS.filter(str.strip))
def test_a_completion_is_trained_to_the_letter(prompt: str, completion: str) -> None:
    tokens = tokens_of(small.PLAIN)
    record = {"prompt": prompt, "completion": completion}

    (document,) = encode([Item("here", record, Place())], tokens).documents

    trained = document.trained.astype(bool)
    assert tokens.decode(document.ids[trained].tolist()) == completion + "<|end|>"
    assert tokens.decode(document.ids[~trained].tolist()) == prompt


def test_equal_tokenizers_have_equal_fingerprints_and_others_not() -> None:
    def print_of(*arguments: Any, **options: Any) -> str:
        return Tokens(small_tokenizer(*arguments, **options)).fingerprint()

    padded = small_tokenizer()
    padded(["a", "bb ccc"], padding=True)
    assert print_of() == print_of() == Tokens(padded).fingerprint()
    assert len({print_of(), print_of(small.MARKED), print_of(vocabulary=380), print_of(None)}) == 4


def test_tokens_wider_than_16_bits_are_kept(tmp_path: Path) -> None:
    tokenizer = small_tokenizer()
    tokenizer.add_tokens([f"w{n}w" for n in range(70_000)])
    dataset = dataset_of(tmp_path, [{"text": "w69999w w69998w"}], tokenizer)

    assert dataset[0].ids.max() == len(tokenizer) - 1 > 1 << 16
    assert dataset[0].ids.dtype == np.int64
