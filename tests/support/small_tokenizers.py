"""A small byte-level BPE tokenizer that is trained in memory, and chat templates for it."""

from __future__ import annotations

import functools
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

WORDS = (
    "the capital of France is Paris and the capital of Italy is Rome. What is two plus three? "
    "It is five. Reverse the word penstock. Water runs down the pipe to the turbine.\n\n"
    "user assistant system Hello! How can I help you today? Thank you very much.\n"
)

PLAIN = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Turns are enclosed in special tokens and not marked."""

MARKED = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Renders the same text as PLAIN, with the assistant's turns marked."""

OPEN_ENDED = MARKED.replace(
    "{{ message['content'] + '<|im_end|>' }}{% endgeneration %}",
    "{{ message['content'] }}{% endgeneration %}{{ '<|im_end|>' }}",
)
"""The marks exclude the end of the turn."""

THINKING = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' and loop.last %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Renders only the last turn with an empty block for reasoning."""

FORGETFUL = (
    "{% for message in messages %}"
    "{% if loop.last or message['role'] != 'assistant' %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Omits all assistant turns but the last, so that partial chats are not prefixes."""

OTHER_GENERATION_PROMPT = PLAIN.replace("<|im_start|>assistant\n", "<|im_start|>assistant<think>\n")
"""The generation prompt differs from the start of the assistant's turns."""

PROSE = (
    "{% for message in messages %}"
    "{{ message['role'] + ': ' + message['content'] + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
"""Has no special tokens, so that borders are inside text that the tokenizer would merge."""


@functools.cache
def _train_tokenizer(vocabulary: int) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<|end|>", "<|im_start|>", "<|im_end|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([WORDS] * 20, trainer)
    return tokenizer.to_str()


def small_tokenizer(template: str | None = PLAIN, *, vocabulary: int = 400, **options: Any) -> Any:
    """Return the tokenizer as transformers would load it."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_train_tokenizer(vocabulary)),
        **{"eos_token": "<|end|>", "pad_token": "<|pad|>", **options},
    )
    tokenizer.chat_template = template
    return tokenizer
