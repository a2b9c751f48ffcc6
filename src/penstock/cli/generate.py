"""`penstock generate`. Room: show.

Answers go to standard output, all else to standard error.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from penstock.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from penstock.generate.generator import Generator
    from penstock.generate.load import Loaded
    from penstock.generate.prompts import Prompts
    from penstock.generate.requests import Piece, Request

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130

Option = typer.Option


Text = Annotated[str | None, Option(help="One prompt; its answer appears as it comes.")]
Lines = Annotated[Path | None, Option(help='JSON lines: {"prompt": ...} or {"messages": [...]}.')]
Stops = Annotated[list[str] | None, Option(help="A text that ends answers; may be repeated.")]
Kind = Annotated[Literal["auto", "bf16", "fp16", "fp32"], Option(help="The model's type.")]
Trust = Annotated[bool, Option("--trust-remote-code", help="Run the model's own code.")]
Plain = Annotated[bool, Option("--no-graphs", help="Make tokens without CUDA graphs.")]
Compiled = Annotated[bool, Option("--compile", help="Compile first: for many tokens.")]
AsJson = Annotated[bool, Option("--json", help="One JSON object per line, nothing else.")]


def generate_command(
    model: Annotated[str, typer.Argument(help="A directory, a run of penstock train, a hub id.")],
    prompt: Text = None,
    file: Lines = None,
    chat: Annotated[bool, Option("--chat", help="Prompts are turns of a user.")] = False,
    max_new: Annotated[int, Option(help="Tokens to make at most.", min=1)] = 512,
    temperature: Annotated[float, Option(help="0: always the likeliest.", min=0.0)] = 0.0,
    top_k: Annotated[int, Option(help="Draw among so many; 0: all.", min=0)] = 0,
    top_p: Annotated[float, Option(help="Draw among this share.", min=0.0, max=1.0)] = 1.0,
    seed: Annotated[int, Option(help="Of what is drawn.")] = 0,
    stop: Stops = None,
    hbm: Annotated[str, Option(help="For weights and cache: 8GiB, or auto.")] = "auto",
    batch: Annotated[int, Option(help="Sequences at once at most.", min=1)] = 16,
    context: Annotated[int | None, Option(help="Tokens of a sequence at most.", min=2)] = None,
    prefill_chunk: Annotated[int | None, Option(help="Prompt tokens of a step.", min=1)] = None,
    no_graphs: Plain = False,
    compiled: Compiled = False,
    dtype: Kind = "auto",
    revision: Annotated[str | None, Option(help="Of the model on the hub.")] = None,
    trust_remote_code: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Continue prompts, many at once, with a cache that grows as they do."""
    from penstock.generate.load import GenerateSettings
    from penstock.generate.prompts import Prompts
    from penstock.generate.requests import Request

    if (prompt is None) == (file is None):
        raise typer.BadParameter("give either --prompt or --file", param_hint="--prompt")
    _check_size(hbm)
    wanted = GenerateSettings(
        model=model, hbm=hbm, dtype=dtype, revision=revision, trust=trust_remote_code
    )
    draws: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    how = Request(prompt="-", max_new=max_new, stop=tuple(stop or ()), **draws)
    loaded = _load(wanted, quiet=as_json)
    asked = _asked(Prompts(loaded.tokenizer, how, chat), prompt, file)
    most, options = min(batch, len(asked)), {"seed": seed, "chunk": prefill_chunk}
    options |= {"graphs": False if no_graphs else None, "compiled": compiled}
    with _generator(loaded, max_batch=most, max_context=context, **options) as generator:
        show = _Json() if as_json else _Live() if file is None else _Listed(len(asked))
        raise typer.Exit(_run(generator, asked, show))


def _asked(prompts: Prompts, prompt: str | None, file: Path | None) -> list[Request]:
    return list(prompts.of_file(file)) if file is not None else [prompts.of_text(prompt or "")]


def _check_size(hbm: str) -> None:
    if hbm != "auto":
        try:
            parse_bytes(hbm)
        except ValueError as wrong:
            raise typer.BadParameter(str(wrong), param_hint="--hbm") from None


def _load(wanted: Any, *, quiet: bool) -> Loaded:
    from penstock.generate.load import load

    console = Console(stderr=True, highlight=False)
    hidden = quiet or not console.is_terminal
    with Progress(console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task("loading", total=None)

        def tell(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)

        loaded = load(wanted, tell)
    for note in loaded.notes:
        print(f"note: {note}", file=sys.stderr)
    return loaded


def _generator(loaded: Loaded, *, max_batch: int, chunk: int | None, **options: Any) -> Generator:
    """Each sequence takes a page at least, so a small cache holds few."""
    from penstock.generate.generator import Generator

    budget = loaded.room.cache
    most = max(1, min(max_batch, budget // loaded.room.page))
    return Generator(
        loaded.forward, budget=budget, max_batch=most, tokenizer=loaded.tokenizer,
        prefill_chunk=loaded.room.chunk if chunk is None else chunk, **options,
    )  # fmt: skip


def _run(generator: Generator, asked: Iterable[Request], show: _Json | _Live | _Listed) -> int:
    failed = False
    try:
        for piece in generator.run(asked):
            show.piece(piece)
            if piece.error is not None:
                print(f"error: {piece.error}", file=sys.stderr)
                failed = True
    except KeyboardInterrupt:
        show.close()
        show.summary(generator)
        print("interrupted; what was answered so far stands", file=sys.stderr)
        return EXIT_INTERRUPTED
    show.close()
    show.summary(generator)
    return EXIT_FAILED if failed else 0


@dataclass(slots=True)
class _Answers:
    """Gathers pieces until an answer is whole."""

    text: dict[str | int, str] = field(default_factory=dict)
    tokens: dict[str | int, list[int]] = field(default_factory=dict)

    def add(self, piece: Piece) -> tuple[str, list[int]] | None:
        name = piece.request
        self.text[name] = self.text.get(name, "") + piece.text
        self.tokens.setdefault(name, []).extend(piece.tokens)
        if piece.finished is None:
            return None
        return self.text.pop(name), self.tokens.pop(name)


class _Live:
    """One answer, written as it comes."""

    def piece(self, piece: Piece) -> None:
        print(piece.text, end="", flush=True)

    def close(self) -> None:
        print(flush=True)

    def summary(self, generator: Generator) -> None:
        print(summary_line(generator), file=sys.stderr)


class _Listed(_Live):
    """Many answers, each when it is whole; a bar meanwhile."""

    def __init__(self, count: int) -> None:
        console = Console(stderr=True, highlight=False)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
                   TimeRemainingColumn())  # fmt: skip
        self._bar = Progress(
            *columns, console=console, transient=True, disable=not console.is_terminal
        )
        self._task = self._bar.add_task("generating", total=count)
        self._bar.start()
        self._answers, self._made = _Answers(), 0

    def piece(self, piece: Piece) -> None:
        self._made += len(piece.tokens)
        self._bar.update(self._task, description=f"{self._made:,} tokens")
        if (whole := self._answers.add(piece)) is not None:
            self._bar.advance(self._task)
            print(f"--- {piece.request} ({piece.finished})\n{whole[0]}", flush=True)

    def close(self) -> None:
        self._bar.stop()


class _Json(_Live):
    """One object for each answer, and one at the end."""

    def __init__(self) -> None:
        self._answers = _Answers()

    def piece(self, piece: Piece) -> None:
        if (whole := self._answers.add(piece)) is not None:
            error = None if piece.error is None else str(piece.error)
            told = {"event": "answer", "id": piece.request, "text": whole[0], "tokens": whole[1],
                    "finished": piece.finished, "error": error}  # fmt: skip
            print(json.dumps(told), flush=True)

    def close(self) -> None:
        return

    def summary(self, generator: Generator) -> None:
        counts = generator.counts
        told = {"event": "done", **asdict(counts), "tokens_per_second": counts.tokens_per_second,
                "waste": counts.waste}  # fmt: skip
        print(json.dumps(told), flush=True)


def summary_line(generator: Generator) -> str:
    counts = generator.counts
    shared = f", {counts.shared_tokens:,} shared" if counts.shared_tokens else ""
    again = f", {counts.preemptions:,} preemptions" if counts.preemptions else ""
    return (
        f"{counts.made_tokens:,} tokens from {counts.prompt_tokens:,}{shared} in "
        f"{counts.seconds:.1f} s, {counts.tokens_per_second:.1f} tokens/s; cache at most "
        f"{format_bytes(counts.peak_bytes)}, {counts.waste:.1%} of its pages in use empty{again}"
    )
