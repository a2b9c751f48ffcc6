"""Reasoning in chats of several turns: templates keep it in the last turn and remove it before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.data.errors import BadLinesError
from tests.data.helpers import chat, dataset_of, trained_text
from tests.support.small_tokenizers import small_tokenizer

KEEPS_LAST = (
    "{% for message in messages %}"
    "{% set content = message['content'] %}"
    "{% set reasoning = message['reasoning_content'] or '' %}"
    "{% if '</think>' in content %}"
    "{% set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' and loop.last %}"
    "{{ '<think>\n' + reasoning + '\n</think>\n\n' }}{% endif %}"
    "{{ content + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Like Qwen3: the reasoning of the last turn only, which the model itself begins."""

PROMPTS_REASONING = KEEPS_LAST.replace(
    "{{ '<|im_start|>assistant\n' }}", "{{ '<|im_start|>assistant\n<think>\n' }}"
)
"""Like Qwen3-Thinking: the generation prompt begins the reasoning."""

ALWAYS_REMOVES = PROMPTS_REASONING.replace("{{ '<think>\n' + reasoning + '\n</think>\n\n' }}", "")
"""Like DeepSeek-R1: no turn has reasoning, although the generation prompt begins it."""


CALLS_TOOLS = KEEPS_LAST.replace(
    "{{ content + '<|im_end|>\n' }}",
    "{{ content }}{% for call in message['tool_calls'] or [] %}"
    "{{ '\n' if content }}{{ '<tool_call>\n' + call['function']['name'] + '\n</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}",
).replace("message['content'] %}", "message['content'] or '' %}")
"""Like Qwen3 with tools."""


def think(reasoning: str, answer: str) -> str:
    return f"<think>\n{reasoning}\n</think>\n\n{answer}"


TALK = chat("What is two?", think("Count.", "It is two."), "Thank you", think("Polite.", "Hello!"))


@pytest.mark.parametrize(
    ("template", "last"),
    [
        (KEEPS_LAST, "<think>\nPolite.\n</think>\n\nHello!<|im_end|>"),
        (PROMPTS_REASONING, "Polite.\n</think>\n\nHello!<|im_end|>"),
    ],
    ids=["model begins", "prompt begins"],
)
def test_earlier_turns_are_trained_without_their_reasoning(
    template: str, last: str, tmp_path: Path
) -> None:
    dataset = dataset_of(tmp_path, [TALK], small_tokenizer(template))

    assert trained_text(dataset) == ["It is two.<|im_end|>", last]
    (note,) = dataset.notes
    assert note.startswith("In 1 chats, the chat template removes the reasoning")


def test_reasoning_in_a_field_of_its_own_is_read_too(tmp_path: Path) -> None:
    talk: Any = chat("What is two?", "It is two.", "Thank you", "Hello!")
    talk["messages"][3]["reasoning_content"] = "Polite."

    dataset = dataset_of(tmp_path, [talk], small_tokenizer(PROMPTS_REASONING))

    assert trained_text(dataset) == [
        "It is two.<|im_end|>", "Polite.\n</think>\n\nHello!<|im_end|>",
    ]  # fmt: skip
    assert dataset.notes == ()  # only the last turn has reasoning


def test_one_turn_keeps_its_reasoning_without_a_note(tmp_path: Path) -> None:
    talk = chat("What is two?", think("Count.", "It is two."))

    dataset = dataset_of(tmp_path, [talk], small_tokenizer(KEEPS_LAST))

    assert trained_text(dataset) == ["<think>\nCount.\n</think>\n\nIt is two.<|im_end|>"]
    assert dataset.notes == ()


def test_a_template_that_never_renders_what_its_prompt_begins_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(BadLinesError, match="cannot be located"):
        dataset_of(tmp_path, [TALK], small_tokenizer(ALWAYS_REMOVES))


@pytest.mark.parametrize("content", ["", None, "<think>\nUse it.\n</think>\n\n", "I look."])
def test_a_turn_that_calls_a_tool_is_trained_with_the_call(
    content: str | None, tmp_path: Path
) -> None:
    talk: Any = chat("What is two?", "", "2", "It is two.")
    talk["messages"][1] |= {
        "content": content,
        "tool_calls": [{"type": "function", "function": {"name": "count", "arguments": {}}}],
    }
    talk["messages"][2]["role"] = "tool"

    dataset = dataset_of(tmp_path, [talk], small_tokenizer(CALLS_TOOLS))

    said = "I look.\n" if content == "I look." else ""
    assert trained_text(dataset) == [
        said + "<tool_call>\ncount\n</tool_call><|im_end|>",
        "<think>\n\n</think>\n\nIt is two.<|im_end|>",
    ]
