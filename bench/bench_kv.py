"""Measure decoding and prefill with Penstock's KV cache, relative to the caches of transformers.

On a GPU, make these calls; --limit ends each after 280 s:

    python bench/bench_kv.py --parts decode --mode eager \\
        --arms "penstock,penstock ragged,dynamic,static" --save eager
    python bench/bench_kv.py --parts decode --mode graph \\
        --arms "penstock,penstock ragged,penstock compiled" --save graph
    python bench/bench_kv.py --parts decode --mode graph --contexts 1024,32768 --batches 1,8 \\
        --arms "penstock compiled,static compiled" --compiled 1024x1,32768x1,32768x8 --save compiled
    python bench/bench_kv.py --parts decode --mode eager,graph --arms "penstock,paged batching" \\
        --save paged
    python bench/bench_kv.py --parts prefill,attention,pages --save parts
    python bench/bench_kv.py --parts arrivals --mode graph --save arrivals

To rehearse on a CPU:

    python bench/bench_kv.py --shape tiny --contexts 64,256 --batches 1,4 --mode eager,graph

Weights are random. An arm is one cache and its settings. In mode `eager`, arms launch their kernels
one by one; in mode `graph`, they use CUDA graphs. StaticCache is compiled with
mode="reduce-overhead" for each shape, and therefore only for the cells of --compiled; transformers'
continuous batching uses its own graphs. Each cell records what did not fit and what there was no
time for. Do not set PYTORCH_CUDA_ALLOC_CONF: expandable segments slow down DynamicCache. Writes
bench/results/kv_<shape>_<name>_<hardware>_<date>.json.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench import certificate, kv_attention
from bench.kv_arms import AHEAD, ARMS, token_nbytes
from bench.kv_decode import decode
from bench.kv_pages import pages
from bench.kv_prefill import prefill, prompt_of
from bench.shapes import SHAPES, config_of
from penstock.errors import PenstockError
from penstock.generate import Generator, Request
from penstock.units import format_bytes, parse_bytes

SPARE = 4 << 30
"""GPU memory to leave free for logits and hidden states, in bytes."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--contexts", default="1024,8192,32768,131072")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--mode", default="eager", help="eager, graph, or both")
    arms = {name: None for arms in ARMS.values() for name in arms}
    parser.add_argument("--arms", default=",".join([*arms, "paged batching"]))
    parser.add_argument(
        "--compiled", default="1024x1,32768x1", help="cells to compile, as CONTEXTxBATCH"
    )
    parser.add_argument("--parts", default="decode,prefill,attention,arrivals")
    parser.add_argument("--limit", type=float, default=280.0, help="seconds, including startup")
    parser.add_argument("--arrivals-budget", default="16GiB")
    parser.add_argument("--arrivals-context", type=int, default=8192)
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--save", metavar="NAME", help="write results under this name")
    return parser.parse_args()


class Bench:
    """The model, the settings and the results of one call."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.began = args, time.perf_counter()
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        self.contexts = [int(each) for each in args.contexts.split(",")]
        self.batches = [int(each) for each in args.batches.split(",")]
        self.modes = args.mode.split(",")
        pairs = (each.split("x") for each in args.compiled.split(",") if each)
        self.compiled = {(int(context), int(batch)) for context, batch in pairs}
        self.model = self._model()
        self.results: dict[str, Any] = {"shape": args.shape, "dtype": str(self.dtype)}
        print(f"model ready after {self.seconds:.0f} s", flush=True)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.began

    def save(self) -> None:
        """Save the results so far, so that a call that is stopped keeps them."""
        if self.args.save:
            self.results["seconds"] = self.seconds
            certificate.save(f"kv_{self.args.shape}_{self.args.save}", self.results)

    def _model(self) -> Any:
        import transformers

        config = config_of(self.args.shape, max(self.contexts) + 2 * AHEAD)
        torch.manual_seed(0)
        with torch.device(self.device):
            make: Any = transformers.AutoModelForCausalLM
            return make.from_config(config, dtype=self.dtype).eval()

    def cell(
        self, context: int, batch: int, measure: Callable[[], Any], *, each: int | None = None
    ) -> Any:
        """Run a measurement and return its result, or a sentence that says why there is none.

        A token needs `each` bytes of cache.
        """
        needed = context * batch * (each or token_nbytes(self.model.config, self.dtype))
        if self.seconds > self.args.limit:
            return "no time left"
        if needed > (free := self._free()):
            return f"does not fit: {format_bytes(needed)} of cache, {format_bytes(free)} free"
        try:
            return measure()
        except (torch.OutOfMemoryError, PenstockError, MemoryError) as full:
            return f"does not fit: {str(full).splitlines()[0]}"
        except Exception as failed:  # a failure of another library must not end the call
            return f"failed: {type(failed).__name__}: {str(failed).splitlines()[:1]}"
        finally:
            gc.collect()
            if self.device == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()

    def _free(self) -> int:
        if self.device == "cpu":
            return 2 << 30
        return int(torch.cuda.mem_get_info()[0]) - SPARE


def attend(bench: Bench, table: list[dict[str, Any]]) -> None:
    """Measure the decode attention of one layer."""
    config = bench.model.config
    head = config.hidden_size // config.num_attention_heads
    shape = (config.num_attention_heads, config.num_key_value_heads, head)
    for context in bench.contexts:
        for batch in bench.batches:
            layers = 8 if context * batch <= 1 << 20 else 1
            measure = partial(kv_attention.measure, shape, context, batch)
            run = partial(measure, layers=layers, device=bench.device)
            each = 2 * (layers + 2) * shape[1] * head * bench.dtype.itemsize
            row = bench.cell(context, batch, run, each=each)
            print("attention", context, batch, row, flush=True)
            table.append({"context": context, "batch": batch, "found": row})
            bench.save()


def arrivals(bench: Bench, table: list[dict[str, Any]]) -> None:
    """Serve requests of random lengths under one budget.

    Once memory is allocated as sequences grow, and once the maximum is reserved for each request,
    which is the same program with fewer rows.
    """
    args = bench.args
    budget, context = parse_bytes(args.arrivals_budget), args.arrivals_context
    each = token_nbytes(bench.model.config, bench.dtype)
    reserved = max(1, budget // (context * each))
    figures: dict[str, Any] = {"budget": budget, "context": context, "rows_reserved": reserved}
    table.append(figures)
    for name, rows in (("grows", args.requests), ("reserved", reserved)):
        most = max(1, min(rows, args.requests, budget // (2 << 20)))
        figures[name] = bench.cell(1, 1, partial(_arrive, bench, budget, context, most))
        print("arrivals", name, figures[name], flush=True)
        bench.save()


def _arrive(bench: Bench, budget: int, context: int, rows: int) -> dict[str, Any]:
    drawn = random.Random(4)
    requests: list[Request | None] = []
    for number in range(bench.args.requests):
        length = int(min(context // 2, 2 ** drawn.uniform(5, 11)))
        new = drawn.randrange(16, max(17, min(128, context - length)))
        requests.append(Request(prompt=prompt_of(bench, length, number), max_new=new))
        requests += [None] * drawn.randrange(2)  # a step without a new request
    graphs = None if "graph" in bench.modes else False
    with Generator(
        bench.model, budget=budget, max_batch=rows, max_context=context, graphs=graphs
    ) as generator:
        first, _ = _serve(generator, requests)  # records graphs and compiles
        made = generator.counts.made_tokens
        seconds, most = _serve(generator, requests)
        counts = generator.counts
    return {
        "seconds": seconds, "tokens_per_second": (counts.made_tokens - made) / seconds,
        "seconds_the_first_time": first, "rows": rows, "most_at_once": most,
        "peak_nbytes": counts.peak_bytes, "waste": counts.waste,
        "preemptions": counts.preemptions, "steps": counts.steps,
    }  # fmt: skip


def _serve(generator: Generator, requests: list[Request | None]) -> tuple[float, int]:
    """Serve the requests; return the seconds and the peak number of concurrent requests."""
    most, began = 0, time.perf_counter()
    for _ in generator.run(requests):
        most = max(most, len(generator._scheduler.running))
    return time.perf_counter() - began, most


PARTS: dict[str, Callable[[Bench, list[dict[str, Any]]], None]] = {
    "decode": decode,
    "prefill": prefill,
    "attention": attend,
    "arrivals": arrivals,
    "pages": pages,
}


def main() -> None:
    args = arguments()
    bench = Bench(args)
    for name in args.parts.split(","):
        PARTS[name](bench, bench.results.setdefault(name, []))
    bench.save()


if __name__ == "__main__":
    main()
