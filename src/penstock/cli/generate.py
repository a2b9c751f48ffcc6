"""`penstock generate`: answer prompts.

Answers go to standard output, everything else to standard error.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from penstock.cli.flags import parse_size, setting_option
from penstock.cli.output import EXIT_ERROR, EXIT_INTERRUPTED, progress_bar
from penstock.settings import LARGEST_BATCH, LARGEST_CONTEXT
from penstock.units import parse_memory

if TYPE_CHECKING:
    from penstock.generate.generator import Generator
    from penstock.generate.load import GenerateSettings, LoadedModel
    from penstock.generate.prompts import Prompts
    from penstock.generate.requests import Request, TokenChunk

Option = typer.Option

PROMPTS, SAMPLING, RUN, MODEL = "Prompts", "Sampling", "Batch and memory", "Model"
"""Panels of `penstock generate --help`."""

PromptText = Annotated[
    str | None,
    Option(
        help="Prompt to answer. The answer is printed while it is generated.",
        rich_help_panel=PROMPTS,
    ),
]
PromptFile = Annotated[
    Path | None,
    Option(
        help='JSON Lines file of {"prompt": ...} or {"messages": ...} objects.',
        rich_help_panel=PROMPTS,
    ),
]
Chat = Annotated[
    bool, Option("--chat", help="Format prompts as chat messages.", rich_help_panel=PROMPTS)
]
MaxNew = Annotated[
    int,
    Option(
        help="Maximum number of new tokens per answer.",
        min=1,
        max=LARGEST_CONTEXT,
        rich_help_panel=SAMPLING,
    ),
]
Temperature = Annotated[
    float,
    Option(
        help="Sampling temperature; 0 always picks the most likely token.",
        min=0.0,
        rich_help_panel=SAMPLING,
    ),
]
TopK = Annotated[
    int,
    Option(
        help="Sample from the K most likely tokens; 0 for all.",
        min=0,
        max=LARGEST_CONTEXT,
        rich_help_panel=SAMPLING,
    ),
]
TopP = Annotated[
    float,
    Option(
        help="Sample from the most likely tokens with this total probability.",
        min=0.0,
        max=1.0,
        rich_help_panel=SAMPLING,
    ),
]
Seed = Annotated[int, Option(help="Random seed for sampling.", rich_help_panel=SAMPLING)]
Stop = Annotated[
    list[str] | None, Option(help="Text that ends an answer. Repeatable.", rich_help_panel=SAMPLING)
]
Hbm = Annotated[
    str,
    Option(
        help="GPU memory budget for weights and KV cache, e.g. 8GiB, or auto.",
        rich_help_panel=RUN,
    ),
]
Batch = Annotated[
    int,
    Option(
        help="Maximum number of sequences decoded concurrently.",
        min=1,
        max=LARGEST_BATCH,
        rich_help_panel=RUN,
    ),
]
Context = Annotated[
    int | None,
    Option(
        help="Maximum number of tokens per sequence (default: the model's limit).",
        min=2,
        max=LARGEST_CONTEXT,
        rich_help_panel=RUN,
    ),
]
PrefillChunk = Annotated[
    int | None,
    Option(
        help="Number of prompt tokens per step (default: chosen for the memory).",
        min=1,
        max=LARGEST_CONTEXT,
        rich_help_panel=RUN,
    ),
]
NoGraphs = Annotated[
    bool, Option("--no-graphs", help="Decode without CUDA graphs.", rich_help_panel=RUN)
]
Compile = Annotated[
    bool,
    Option(
        "--compile",
        help="Compile the model first, which pays off for many tokens.",
        rich_help_panel=RUN,
    ),
]
DtypeName = Annotated[
    Literal["auto", "bf16", "fp16", "fp32"],
    Option(help="Data type of the weights; auto keeps the model's own.", rich_help_panel=MODEL),
]
Revision = Annotated[str | None, setting_option("revision", MODEL)]
TrustRemoteCode = Annotated[bool, setting_option("trust_remote_code", MODEL)]
Blocks = Annotated[str | None, setting_option("blocks", MODEL)]
JsonLines = Annotated[bool, Option("--json", help="Print one JSON object per line.")]


def generate_command(
    model: Annotated[
        str,
        typer.Argument(help="Model directory, `penstock train` output, or Hugging Face model ID."),
    ],
    prompt: PromptText = None,
    file: PromptFile = None,
    chat: Chat = False,
    max_new: MaxNew = 512,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    stop: Stop = None,
    hbm: Hbm = "auto",
    batch: Batch = 16,
    context: Context = None,
    prefill_chunk: PrefillChunk = None,
    no_graphs: NoGraphs = False,
    compiled: Compile = False,
    dtype: DtypeName = "auto",
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    blocks: Blocks = None,
    as_json: JsonLines = False,
) -> None:
    """Answer one prompt or a file of prompts, many concurrently."""
    from penstock.generate.load import GenerateSettings
    from penstock.generate.prompts import Prompts
    from penstock.generate.requests import Request

    if (prompt is None) == (file is None):
        raise typer.BadParameter("give either --prompt or --file", param_hint="--prompt")
    _check_size(hbm)
    settings = GenerateSettings(
        model=model,
        hbm=hbm,
        dtype=dtype,
        revision=revision,
        trust=trust_remote_code,
        blocks=blocks,
    )
    sampling: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    defaults = Request(prompt="-", max_new=max_new, stop=tuple(stop or ()), **sampling)
    requests: list[Request] = []

    def read_requests(tokenizer: Any) -> None:
        requests.extend(_read_requests(Prompts(tokenizer, defaults, chat), prompt, file))

    loaded = _load_model(settings, read_requests, quiet=as_json)
    options = {
        "seed": seed,
        "chunk": prefill_chunk,
        "graphs": False if no_graphs else None,
        "compiled": compiled,
    }
    most = min(batch, len(requests))
    with _make_generator(loaded, max_batch=most, max_context=context, **options) as generator:
        view = _Json() if as_json else _Live() if file is None else _Listed(len(requests))
        raise typer.Exit(_run(generator, requests, view))


def summary_line(generator: Generator) -> str:
    """Summarize the run: tokens, time and rate. `--json` has the memory of the KV cache, too."""
    counts = generator.counts
    shared = f", {counts.shared_tokens:,} shared" if counts.shared_tokens else ""
    preempted = f", {counts.preemptions:,} preemptions" if counts.preemptions else ""
    return (
        f"{counts.made_tokens:,} tokens from {counts.prompt_tokens:,}{shared} in "
        f"{counts.seconds:.1f} s, {counts.tokens_per_second:.1f} tokens/s{preempted}"
    )


def _read_requests(prompts: Prompts, prompt: str | None, file: Path | None) -> list[Request]:
    return list(prompts.from_file(file)) if file is not None else [prompts.from_text(prompt or "")]


def _check_size(hbm: str) -> None:
    if hbm != "auto":
        parse_size(hbm, "--hbm", parse_memory)


def _load_model(
    settings: GenerateSettings, on_tokenizer: Callable[[Any], None], *, quiet: bool
) -> LoadedModel:
    from penstock.generate.load import load

    with progress_bar("loading", quiet=quiet) as report:
        loaded = load(settings, report, on_tokenizer=on_tokenizer)
    for note in loaded.notes:
        print(f"note: {note}", file=sys.stderr)
    return loaded


def _make_generator(
    loaded: LoadedModel, *, max_batch: int, chunk: int | None, **options: Any
) -> Generator:
    from penstock.generate.generator import Generator

    budget = loaded.memory.cache
    # Every sequence takes at least one page, so a small cache limits the batch.
    most = max(1, min(max_batch, budget // loaded.memory.page))
    return Generator(
        loaded.forward, budget=budget, max_batch=most, tokenizer=loaded.tokenizer,
        prefill_chunk=loaded.memory.chunk if chunk is None else chunk, **options,
    )  # fmt: skip


def _run(generator: Generator, requests: Iterable[Request], view: _Json | _Live | _Listed) -> int:
    """Answer all requests and return the exit code: 1 if a request failed, 130 after Ctrl-C."""
    failed = False
    try:
        for chunk in generator.run(requests):
            view.add(chunk)
            if chunk.error is not None:
                print(f"error: {chunk.error}", file=sys.stderr)
                failed = True
    except KeyboardInterrupt:
        view.close()
        view.summarize(generator)
        print("interrupted; the answers printed so far are valid", file=sys.stderr)
        return EXIT_INTERRUPTED
    view.close()
    view.summarize(generator)
    return EXIT_ERROR if failed else 0


@dataclass(slots=True)
class _Answers:
    """Collects the chunks of each answer until it is complete."""

    text: dict[str | int, str] = field(default_factory=dict)
    tokens: dict[str | int, list[int]] = field(default_factory=dict)

    def add(self, chunk: TokenChunk) -> tuple[str, list[int]] | None:
        """Add a chunk. Return text and tokens of the answer if it is complete now."""
        request = chunk.request
        self.text[request] = self.text.get(request, "") + chunk.text
        self.tokens.setdefault(request, []).extend(chunk.tokens)
        if chunk.finished is None:
            return None
        return self.text.pop(request), self.tokens.pop(request)


class _Live:
    """Prints one answer as it is generated."""

    def add(self, chunk: TokenChunk) -> None:
        print(chunk.text, end="", flush=True)

    def close(self) -> None:
        print(flush=True)

    def summarize(self, generator: Generator) -> None:
        print(summary_line(generator), file=sys.stderr)


class _Listed(_Live):
    """Prints each of many answers when it is complete, and shows a progress bar."""

    def __init__(self, count: int) -> None:
        console = Console(stderr=True, highlight=False)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
                   TimeRemainingColumn())  # fmt: skip
        self._bar = Progress(
            *columns, console=console, transient=True, disable=not console.is_terminal
        )
        self._task = self._bar.add_task("generating", total=count)
        self._bar.start()
        self._answers, self._token_count = _Answers(), 0

    def add(self, chunk: TokenChunk) -> None:
        self._token_count += len(chunk.tokens)
        self._bar.update(self._task, description=f"{self._token_count:,} tokens")
        if (answer := self._answers.add(chunk)) is not None:
            self._bar.advance(self._task)
            print(f"--- {chunk.request} ({chunk.finished})\n{answer[0]}", flush=True)

    def close(self) -> None:
        self._bar.stop()


class _Json(_Live):
    """Prints one JSON object per answer, and one with the counts at the end."""

    def __init__(self) -> None:
        self._answers = _Answers()

    def add(self, chunk: TokenChunk) -> None:
        if (answer := self._answers.add(chunk)) is not None:
            error = None if chunk.error is None else str(chunk.error)
            event = {"event": "answer", "id": chunk.request, "text": answer[0],
                     "tokens": answer[1], "finished": chunk.finished, "error": error}  # fmt: skip
            print(json.dumps(event), flush=True)

    def close(self) -> None:
        return

    def summarize(self, generator: Generator) -> None:
        counts = generator.counts
        event = {"event": "done", **asdict(counts), "tokens_per_second": counts.tokens_per_second,
                 "waste": counts.waste}  # fmt: skip
        print(json.dumps(event), flush=True)
