"""Make a small chat dataset, a tokenizer and the config of a tiny Llama, for a demo run.

    python examples/make_demo_data.py demo/

Nothing is downloaded, and the same seed gives the same bytes. The chats ask for capitals, days,
sums in words, opposites and spellings. These are so few facts that a model of five million
parameters with random weights learns to answer within minutes on a CPU.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, PreTrainedTokenizerFast


def pairs(text: str) -> dict[str, str]:
    """Parse text such as `France:Paris,Italy:Rome` into a dictionary."""
    return dict(pair.split(":") for pair in text.split(","))


def words(text: str) -> list[str]:
    return text.split()


CAPITALS = pairs(
    "France:Paris,Italy:Rome,Spain:Madrid,Portugal:Lisbon,Germany:Berlin,Austria:Vienna,"
    "Poland:Warsaw,Norway:Oslo,Sweden:Stockholm,Finland:Helsinki,Denmark:Copenhagen,"
    "Greece:Athens,Hungary:Budapest,Ireland:Dublin,Belgium:Brussels,Egypt:Cairo,Kenya:Nairobi,"
    "Japan:Tokyo,China:Beijing,India:New Delhi,Thailand:Bangkok,Vietnam:Hanoi,Peru:Lima,"
    "Chile:Santiago,Cuba:Havana,Canada:Ottawa,Australia:Canberra,Iceland:Reykjavik"
)
OPPOSITES = pairs(
    "hot:cold,big:small,fast:slow,old:young,light:dark,full:empty,early:late,high:low,wet:dry,"
    "soft:hard,loud:quiet,rich:poor,strong:weak,near:far,open:closed,long:short"
)
DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = words(
    "January February March April May June July August September October November December"
)
NUMBERS = words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen"
)
SHORT_WORDS = words(
    "cat dog sun map pen cup net tap pot bus hat log pin rat tin van web zip box jam"
)

TEMPLATE = """\
{%- for message in messages -%}
<|{{ message['role'] }}|>
{% if message['role'] == 'assistant' -%}
{% generation %}{{ message['content'] }}<|end|>{% endgeneration %}
{%- else -%}
{{ message['content'] }}<|end|>
{%- endif %}
{% endfor -%}
{%- if add_generation_prompt -%}
<|assistant|>
{% endif -%}
"""

Turn = tuple[str, str]


def capital(pick: random.Random) -> Turn:
    country = pick.choice(list(CAPITALS))
    template = pick.choice(
        ["What is the capital of {}?", "Name the capital of {}.", "Capital of {}?"]
    )
    return template.format(country), f"The capital of {country} is {CAPITALS[country]}."


def opposite(pick: random.Random) -> Turn:
    word, other = pick.choice(list(OPPOSITES.items()))
    if pick.random() < 0.5:
        word, other = other, word
    template = pick.choice(["What is the opposite of {}?", "Give me the opposite of {}."])
    return template.format(word), f"The opposite of {word} is {other}."


def day(pick: random.Random) -> Turn:
    names, what = pick.choice([(DAYS, "day"), (MONTHS, "month")])
    place, step = pick.randrange(len(names)), pick.choice([-1, 1])
    relation = "after" if step > 0 else "before"
    answer = names[(place + step) % len(names)]
    template = pick.choice(
        [f"Which {what} comes {relation} {{}}?", f"What {what} is {relation} {{}}?"]
    )
    return template.format(names[place]), f"{answer} comes {relation} {names[place]}."


def addition(pick: random.Random) -> Turn:
    first, second = pick.randrange(10), pick.randrange(10)
    template = pick.choice(["What is {} plus {}?", "Add {} and {}.", "How much is {} plus {}?"])
    left, right = NUMBERS[first], NUMBERS[second]
    return template.format(left, right), f"{left} plus {right} is {NUMBERS[first + second]}."


def spelling(pick: random.Random) -> Turn:
    word = pick.choice(SHORT_WORDS)
    if pick.random() < 0.5:
        return f"Spell the word {word}.", f"{word} is spelled {'-'.join(word)}."
    return f"Reverse the word {word}.", f"{word} reversed is {'-'.join(reversed(word))}."


Tasks = tuple[Callable[[random.Random], Turn], ...]

TASKS: Tasks = (capital, opposite, day, addition, spelling)
POLITE = ("You are a helpful assistant.", "Answer in one short sentence.")


def make_chat(pick: random.Random, tasks: Tasks = TASKS) -> dict[str, object]:
    """Make a chat of one to three questions, sometimes with a system message."""
    messages = []
    if pick.random() < 0.3:
        messages.append({"role": "system", "content": pick.choice(POLITE)})
    for _ in range(pick.choice([1, 1, 2, 2, 3])):
        question, answer = pick.choice(tasks)(pick)
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer[0].upper() + answer[1:]})
    return {"messages": messages}


def make_tokenizer(texts: list[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on the chats."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    roles = ["<|system|>", "<|user|>", "<|assistant|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<|end|>", "<|pad|>", *roles],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>"
    )
    wrapped.chat_template = TEMPLATE
    return wrapped


def make_config(
    tokenizer: PreTrainedTokenizerFast, *, hidden: int = 256, layers: int = 6
) -> LlamaConfig:
    """Make the config of a Llama, by default with about five million parameters."""
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="bfloat16",
    )


def make(
    directory: str | Path,
    *,
    chats: int = 8000,
    seed: int = 0,
    vocabulary: int = 2048,
    tasks: Tasks = TASKS,
    **shape: int,
) -> Path:
    """Write `chats.jsonl` and `model/`, which contains config and tokenizer but no weights."""
    directory = Path(directory)
    model = directory / "model"
    model.mkdir(parents=True, exist_ok=True)
    pick = random.Random(seed)
    dialogs = [make_chat(pick, tasks) for _ in range(chats)]
    lines = [json.dumps(chat) for chat in dialogs]
    (directory / "chats.jsonl").write_text("\n".join(lines) + "\n")
    texts = [turn["content"] for chat in dialogs for turn in chat["messages"]]  # type: ignore[attr-defined]
    tokenizer = make_tokenizer(texts, vocabulary)
    tokenizer.save_pretrained(model)
    make_config(tokenizer, **shape).save_pretrained(model)
    return directory


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--chats", type=int, default=8000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    directory = make(options.directory, chats=options.chats, seed=options.seed)
    size = (directory / "chats.jsonl").stat().st_size
    print(f"{directory / 'chats.jsonl'} ({size / 1e6:.1f} MB) and {directory / 'model'} written")


if __name__ == "__main__":
    main()
