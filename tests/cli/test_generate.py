"""`penstock generate`: its output and its exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.cli import main
from penstock.data import load_tokenizer
from tests.equivalence.compiled import compile_by, graphs
from tests.kv.tiny_generators import reference_tokens
from tests.support.engines import plain_model, tiny_config
from tests.support.small_tokenizers import MARKED, small_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")

Output = tuple[int, str, str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that does not repeat itself, and does not end within a few tokens."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = small_tokenizer(MARKED)
    config = tiny_config("llama", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    built = plain_model(config, dtype=torch.float32, seed=3)
    with torch.no_grad():
        for parameter in built.parameters():
            if parameter.ndim == 2:
                parameter.mul_(10)
    built.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def generate(model: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Output]:
    def run(*arguments: str, of: Path = model) -> Output:
        code = main.run(["generate", str(of), "--max-new", "6", *arguments])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


def expected(model: Path, text: str) -> str:
    import transformers

    tokenizer = load_tokenizer(model)
    make: Any = transformers.AutoModelForCausalLM
    loaded = make.from_pretrained(model).eval()
    return str(tokenizer.decode(reference_tokens(loaded, tokenizer(text)["input_ids"], 6)))


def write(path: Path, *lines: object) -> str:
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return str(path)


@pytest.mark.parametrize("how", ["--no-graphs", "--compile"])
def test_graphs_and_compilation_do_not_change_the_tokens(
    how: str, generate: Callable[..., Output], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_by("aot_eager", monkeypatch)

    code, out, _ = generate("--prompt", "Water runs", how)

    assert code == 0
    assert out.strip().endswith(expected(model, "Water runs").strip())
    assert (graphs() > 0) == (how == "--compile")


def test_one_prompt_is_answered_and_summarized(generate: Any, model: Path) -> None:
    code, out, err = generate("--prompt", "the capital of")

    assert code == 0
    assert out == expected(model, "the capital of") + "\n"
    assert "6 tokens from" in err
    assert err.rstrip().endswith("tokens/s")  # the pages of the cache are in --json


def test_weights_that_do_not_fit_are_streamed_with_a_note(generate: Any, model: Path) -> None:
    code, out, err = generate("--prompt", "the capital of", "--hbm", "280KiB")

    assert (code, out) == (0, expected(model, "the capital of") + "\n")
    assert "stay in host memory" in err
    assert "This is slow" in err


def test_a_file_of_prompts_is_answered_as_json_lines(
    generate: Any, model: Path, tmp_path: Path
) -> None:
    turns = [{"role": "user", "content": "Hello!"}]
    prompts = write(
        tmp_path / "p.jsonl",
        {"prompt": "the capital of"},
        {"prompt": "Water runs", "id": "water", "max_new": 3},
        {"messages": turns},
        {"prompt": "It", "temperature": 0.9, "seed": 4, "top_k": 20, "top_p": 0.9},
    )
    code, out, _ = generate("--file", prompts, "--json", "--batch", "2")
    events = [json.loads(line) for line in out.splitlines()]
    answers = {event["id"]: event for event in events[:-1]}

    assert code == 0
    assert answers.keys() == {0, "water", 2, 3}
    assert answers[0]["text"] == expected(model, "the capital of")
    assert [len(answers["water"]["tokens"]), answers["water"]["finished"]] == [3, "length"]
    assert events[-1]["event"] == "done"
    assert events[-1]["made_tokens"] == sum(len(a["tokens"]) for a in answers.values())


def test_a_chat_uses_the_chat_template(generate: Any, model: Path, tmp_path: Path) -> None:
    prompts = write(tmp_path / "p.jsonl", {"messages": [{"role": "user", "content": "Hello!"}]})
    _, listed, _ = generate("--file", prompts)
    _, chat, _ = generate("--prompt", "Hello!", "--chat")

    assert listed == f"--- 0 (length)\n{chat}"
    assert chat != expected(model, "Hello!") + "\n"


def test_a_failed_request_is_reported_and_the_others_are_answered(
    generate: Any, tmp_path: Path
) -> None:
    prompts = write(tmp_path / "p.jsonl", {"prompt": "It " * 200, "id": "long"}, {"prompt": "It"})
    code, out, err = generate("--file", prompts, "--json")
    answers = {e["id"]: e for e in map(json.loads, out.splitlines()) if e["event"] == "answer"}

    assert code == 1
    assert answers["long"]["finished"] == "error"
    assert "the prompt has" in answers["long"]["error"]
    assert "error: request long: the prompt has" in err
    assert len(answers[1]["tokens"]) == 6


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"prompt": 5}', 'p.jsonl:2: "prompt" must be text, got 5'),
        ("{}", 'p.jsonl:2: must have either "prompt" or "messages"'),
        ("[]", "p.jsonl:2: must be an object such as"),
        ("nonsense", "p.jsonl:2: is not JSON"),
        ('{"prompt": "x", "max_new": "7"}', "p.jsonl:2: \"max_new\" must be int, got '7'"),
        ('{"prompt": ""}', "p.jsonl:2: is empty"),
    ],
)
def test_an_invalid_line_is_named_before_anything_runs(
    line: str, words: str, generate: Any, tmp_path: Path
) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "It"}\n' + line + "\n")
    code, out, err = generate("--file", str(path))

    assert (code, out) == (1, "")
    assert words in err
    assert "Traceback" not in err


@pytest.mark.parametrize("arguments", [("--prompt", ""), ("--file", "missing.jsonl")])
def test_prompts_are_read_before_the_weights(
    arguments: tuple[str, str], generate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.generate.load.load_resident", None)

    code, out, err = generate(*arguments)

    assert (code, out) == (1, "")
    assert arguments[1] in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 2, "give either --prompt or --file"),
        (["--prompt", "a", "--file", "b"], 2, "give either --prompt or --file"),
        (["--prompt", "a", "--hbm", "much"], 2, "is not a size"),
        (["--prompt", "a", "--hbm", "100KiB"], 1, "streaming the weights block by block needs"),
        (["--prompt", ""], 1, "--prompt: is empty"),
        (["--file", "missing.jsonl"], 1, "missing.jsonl: No such file or directory"),
    ],
)
def test_a_user_error_is_reported_without_a_traceback(
    arguments: list[str], code: int, words: str, generate: Any
) -> None:
    ended, out, err = generate(*arguments)

    assert (ended, out) == (code, "")
    assert words in " ".join(err.replace("│", " ").split())
    assert "Traceback" not in err


def test_a_tokenizer_without_a_template_cannot_chat(
    generate: Any, model: Path, tmp_path: Path
) -> None:
    for path in model.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    small_tokenizer(None).save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    code, _, err = generate("--prompt", "a", "--chat", of=tmp_path)

    assert code == 1
    assert "has no chat template" in err


def test_ctrl_c_keeps_the_answers_so_far(generate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.generate.generator import Generator

    step = Generator.step
    taken: list[int] = []

    def interrupted(self: Generator) -> Any:
        if len(taken) == 15:
            raise KeyboardInterrupt
        taken.append(1)
        return step(self)

    monkeypatch.setattr(Generator, "step", interrupted)
    code, out, err = generate("--prompt", "the capital of", "--max-new", "20")

    assert code == 130
    assert out.strip()
    assert "interrupted; the answers printed so far" in err


def test_an_unfinished_run_uses_its_newest_checkpoint(
    generate: Any, model: Path, tmp_path: Path
) -> None:
    from penstock.checkpoint.run_directory import new_checkpoint

    for path in model.iterdir():
        if not path.name.startswith("model"):
            (tmp_path / path.name).write_bytes(path.read_bytes())
    with new_checkpoint(tmp_path, 3) as folder:
        for path in model.iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
    code, out, _ = generate("--prompt", "the capital of", of=tmp_path)

    assert (code, out) == (0, expected(model, "the capital of") + "\n")
