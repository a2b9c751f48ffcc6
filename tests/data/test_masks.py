"""Only the assistant's turns are trained, with their end tokens; anything unclear is an error."""

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
from penstock.data.examples import RecordFormat
from penstock.data.items import Item, SourceOffset
from penstock.data.tokenizer import Tokens
from tests.data.helpers import chat, dataset_of, trained_text, whole_text
from tests.support import small_tokenizers as small
from tests.support.small_tokenizers import small_tokenizer

TALK = chat("What is two?", "It is two.", "And three?", "That is three.", system="Be brief.")
TURNS = ["It is two.<|im_end|>", "That is three.<|im_end|>"]


@pytest.mark.parametrize("template", [small.PLAIN, small.MARKED], ids=["unmarked", "marked"])
def test_assistant_turns_are_trained_with_their_end_tokens(template: str, tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path, [TALK], small_tokenizer(template))

    assert trained_text(dataset) == TURNS
    assert whole_text(dataset) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nWhat is two?<|im_end|>\n<|im_start|>assistant\nIt is two.<|im_end|>\n"
        "<|im_start|>user\nAnd three?<|im_end|>\n<|im_start|>assistant\nThat is three.<|im_end|>\n"
    )


def test_generation_marks_give_the_same_mask_as_transformers(tmp_path: Path) -> None:
    tokenizer = small_tokenizer(small.MARKED)
    dataset = dataset_of(tmp_path, [TALK], tokenizer)

    expected = tokenizer.apply_chat_template(
        TALK["messages"], return_dict=True, return_assistant_tokens_mask=True
    )

    assert dataset[0].ids.tolist() == expected["input_ids"]
    assert dataset[0].trained.astype(int).tolist() == expected["assistant_masks"]


def test_a_template_may_render_the_last_turn_differently(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path, [TALK], small_tokenizer(small.THINKING))

    assert trained_text(dataset) == [TURNS[0], "<think>\n\n</think>\n\n" + TURNS[1]]


SHOUTING = small.PLAIN.replace(
    "message['content']",
    "(message['content'] | upper if message['role'] == 'assistant' and not loop.last"
    " else message['content'])",
)
"""Renders an answer differently when other turns follow it."""


@pytest.mark.parametrize("template", [small.FORGETFUL, small.OTHER_GENERATION_PROMPT, SHOUTING])
def test_a_template_whose_partial_chats_are_no_prefixes_is_rejected(
    template: str, tmp_path: Path
) -> None:
    with pytest.raises(
        BadLinesError, match=r"data.jsonl:1: .*cannot be located.*generation"
    ) as caught:
        dataset_of(tmp_path, [TALK], small_tokenizer(template))
    assert caught.value.count == 1


MISPLACED = (
    "{% set answer %}{% generation %}{{ messages[1]['content'] }}{% endgeneration %}{% endset %}"
    "{{ messages[0]['content'] + ' -> ' + answer }}"
)
ONCE = small.MARKED.replace("== 'assistant' %}", "== 'assistant' and loop.last %}")


@pytest.mark.parametrize(
    ("template", "words"),
    [(MISPLACED, "does not contain its content"), (ONCE, "marks 1 spans for 2 assistant turns")],
)
def test_marks_that_do_not_enclose_the_content_are_rejected(
    template: str, words: str, tmp_path: Path
) -> None:
    talk = chat("A question.", "An answer.") if template is MISPLACED else TALK
    with pytest.raises(BadLinesError, match=words):
        dataset_of(tmp_path, [talk], small_tokenizer(template))


def test_marks_that_exclude_the_end_of_the_turn_are_reported(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path, [TALK], small_tokenizer(small.OPEN_ENDED))

    assert trained_text(dataset) == ["It is two.", "That is three."]
    assert "will not learn to stop" in dataset.notes[0]


def test_the_prompt_has_its_own_tokens_if_words_would_merge(tmp_path: Path) -> None:
    """`assistant: ` and `the` merge to ` the`, but the prompt ends with the blank alone."""
    tokenizer = small_tokenizer(small.PROSE)
    dataset = dataset_of(tmp_path, [chat("Which?", "the pipe")], tokenizer)
    prompt_ids = tokenizer("user: Which?\nassistant: ")["input_ids"]

    ids = dataset[0].ids.tolist()
    assert ids[: len(prompt_ids)] == prompt_ids
    assert trained_text(dataset) == ["the pipe\n"]
    assert ids != tokenizer("user: Which?\nassistant: the pipe\n")["input_ids"]


def metaspace_tokenizer() -> Any:
    """Return a tokenizer that puts a blank before every text, as that of Llama 2 does."""
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


def test_a_blank_that_the_tokenizer_adds_does_not_move_a_border(tmp_path: Path) -> None:
    tokenizer = metaspace_tokenizer()
    record = {"prompt": "Which pipe?</s>", "completion": "the capital"}
    dataset = dataset_of(tmp_path, [record], tokenizer)

    whole = tokenizer("Which pipe?</s>the capital")["input_ids"]
    prompt_ids = tokenizer("Which pipe?</s>")["input_ids"]
    # The parts encoded alone would be wrong.
    assert tokenizer("the capital")["input_ids"] != whole[len(prompt_ids) :]
    assert dataset[0].ids.tolist() == [*whole, tokenizer.eos_token_id]
    assert dataset[0].trained.tolist() == [n >= len(prompt_ids) for n in range(len(whole) + 1)]


def test_a_border_inside_a_token_is_rejected(tmp_path: Path) -> None:
    record = {"prompt": "the capital of It", "completion": "aly"}
    with pytest.raises(BadLinesError, match="a token crosses the border near"):
        dataset_of(tmp_path, [record], metaspace_tokenizer())


def test_turns_with_weight_zero_and_in_the_prompt_are_masked(tmp_path: Path) -> None:
    talk = chat("What is two?", "It is two.", "And three?", "That is three.")
    talk["messages"][1]["weight"] = 0
    turns = chat("What is two?", "It is two.", "And three?", "That is three.")["messages"]
    split = {"prompt": turns[:3], "completion": turns[3:]}
    dataset = dataset_of(tmp_path, [talk, split])

    assert trained_text(dataset, 0) == trained_text(dataset, 1) == [TURNS[1]]


def test_sharegpt_keys_are_supported(tmp_path: Path) -> None:
    said = [("system", "Be brief."), ("human", "What is two?"), ("gpt", "It is two.")]
    shared = {"conversations": [{"from": who, "value": what} for who, what in said]}
    separate = {"system": "Be brief.", "conversations": shared["conversations"][1:]}
    ours = chat("What is two?", "It is two.", system="Be brief.")
    dataset = dataset_of(tmp_path, [shared, separate, ours])

    assert whole_text(dataset, 0) == whole_text(dataset, 1) == whole_text(dataset, 2)
    assert trained_text(dataset) == [TURNS[0]]


def test_the_completion_is_trained_and_the_prompt_is_not(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path, [{"prompt": "two plus three is", "completion": " five"}])

    assert trained_text(dataset) == [" five<|end|>"]
    assert whole_text(dataset) == "two plus three is five<|end|>"


def test_a_text_is_trained_completely(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path, [{"text": "Water runs down."}])

    assert trained_text(dataset) == ["Water runs down.<|end|>"]


def test_opening_tokens_are_added_and_masked(tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = small_tokenizer()
    start = tokenizer.convert_tokens_to_ids("<|im_start|>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", start)]
    )
    dataset = dataset_of(tmp_path, [{"text": "Water"}, chat("Hello!", "Hello!")], tokenizer)

    assert whole_text(dataset, 0) == "<|im_start|>Water<|end|>"
    assert trained_text(dataset, 0) == ["Water<|end|>"]
    assert whole_text(dataset, 1).count("<|im_start|>") == 2  # only those of the template


def test_a_missing_chat_template_is_an_error_with_a_fix(tmp_path: Path) -> None:
    with pytest.raises(NoChatTemplateError, match=r"data.jsonl:1 is a chat.*chat_template.jinja"):
        dataset_of(tmp_path, [TALK], small_tokenizer(None))


def test_texts_need_an_end_token(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="no eos_token"):
        dataset_of(tmp_path, [{"text": "Water"}], small_tokenizer(eos_token=None))


def test_tools_need_a_template_that_supports_them(
    tmp_path: Path,
) -> None:
    talk = {**chat("What is two?", "It is two."), "tools": [{"name": "add"}]}
    with pytest.raises(BadLinesError, match="has tools, which the chat template does not support"):
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
def test_the_trained_text_is_what_the_assistant_said(turns: list[str], template: str) -> None:
    """Covers blanks, newlines and multi-byte characters."""
    tokens = tokens_of(template)
    item = Item("here", chat(*turns), SourceOffset())

    (document,) = encode([item], tokens, RecordFormat()).documents

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
def test_exactly_the_completion_is_trained(prompt: str, completion: str) -> None:
    tokens = tokens_of(small.PLAIN)
    record = {"prompt": prompt, "completion": completion}

    (document,) = encode([Item("here", record, SourceOffset())], tokens, RecordFormat()).documents

    trained = document.trained.astype(bool)
    assert tokens.decode(document.ids[trained].tolist()) == completion + "<|end|>"
    assert tokens.decode(document.ids[~trained].tolist()) == prompt


def test_only_equal_tokenizers_have_equal_fingerprints() -> None:
    def print_of(*arguments: Any, **options: Any) -> str:
        return Tokens(small_tokenizer(*arguments, **options)).fingerprint()

    padded, truncated = small_tokenizer(), small_tokenizer()
    padded(["a", "bb ccc"], padding=True)
    truncated("a bb ccc", truncation=True, max_length=2)
    assert print_of() == print_of() == Tokens(padded).fingerprint()
    assert print_of() == Tokens(truncated).fingerprint()
    assert len({print_of(), print_of(small.MARKED), print_of(vocabulary=380), print_of(None)}) == 4


def test_tokens_wider_than_16_bits_are_stored(tmp_path: Path) -> None:
    tokenizer = small_tokenizer()
    tokenizer.add_tokens([f"w{n}w" for n in range(70_000)])
    dataset = dataset_of(tmp_path, [{"text": "w69999w w69998w"}], tokenizer)

    assert dataset[0].ids.max() == len(tokenizer) - 1 > 1 << 16
    assert dataset[0].ids.dtype == np.int64
