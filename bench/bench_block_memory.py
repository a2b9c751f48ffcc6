"""Measure the GPU memory and time of one transformer layer: the constants of the cost model.

Measures the size of the CUDA context, and the peak memory and time of a layer's forward pass, of
its recomputation plus backward pass, and of one chunk of the head. Prints JSON, which
docs/planner.md quotes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time

import torch
import transformers
from torch import nn
from transformers.models.llama.modeling_llama import (
    LlamaConfig,
    LlamaDecoderLayer,
    LlamaRotaryEmbedding,
)

# hidden size, MLP size, query heads, key-value heads, vocabulary
SIZES = {"3B": (2048, 11008, 16, 2, 151936), "8B": (4096, 14336, 32, 8, 128256)}


def used_device_bytes() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


def context_bytes() -> dict[str, int]:
    torch.cuda.init()
    bare = used_device_bytes()
    a = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16)
    (a @ a).sum().item()
    nn.functional.scaled_dot_product_attention(*[a.view(1, 8, 1024, 128)] * 3, is_causal=True)
    torch.cuda.synchronize()
    return {"context": bare, "with_libraries": used_device_bytes() - torch.cuda.memory_reserved()}


def timed(run, repeat: int = 5) -> float:
    run()
    torch.cuda.synchronize()
    seconds = []
    for _ in range(repeat):
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return sorted(seconds)[repeat // 2]


def peak_above(run) -> int:
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def layer(size: str, sequences: int, context: int) -> dict[str, float]:
    hidden, mlp, heads, kv_heads, _ = SIZES[size]
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=mlp,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        num_hidden_layers=1,
        attn_implementation="sdpa",
    )
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        block, rotary = LlamaDecoderLayer(config, 0), LlamaRotaryEmbedding(config)
        torch.set_default_dtype(torch.float32)
    for p in block.parameters():
        p.grad = torch.zeros_like(p)
    x = torch.randn(sequences, context, config.hidden_size, device="cuda", dtype=torch.bfloat16)
    position = rotary(x, torch.arange(context, device="cuda")[None])
    x.requires_grad_()
    out_grad = torch.randn_like(x)

    def forward():
        with torch.no_grad():
            block(x, position_embeddings=position, attention_mask=None)

    def backward():
        x.grad = None
        out = block(x, position_embeddings=position, attention_mask=None)
        (out[0] if isinstance(out, tuple) else out).backward(out_grad)

    return {
        "size": size, "sequences": sequences, "context": context,
        "parameters": sum(p.numel() for p in block.parameters()),
        "forward_seconds": timed(forward), "recompute_backward_seconds": timed(backward),
        "forward_peak": peak_above(forward), "recompute_backward_peak": peak_above(backward),
    }  # fmt: skip


def head(size: str, chunk: int) -> dict[str, float]:
    hidden, _, _, _, vocabulary = SIZES[size]
    kind = {"device": "cuda", "dtype": torch.bfloat16}
    weight = torch.randn(vocabulary, hidden, requires_grad=True, **kind)
    weight.grad = torch.zeros_like(weight)
    x = torch.randn(chunk, hidden, **kind)
    target = torch.randint(0, vocabulary, (chunk,), device="cuda")

    def run():
        y = x.detach().requires_grad_()
        nn.functional.cross_entropy((y @ weight.T).float(), target).backward()

    return {"size": size, "chunk": chunk, "seconds": timed(run), "peak": peak_above(run)}


def matmul() -> float:
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    return 2 * 8192**3 / timed(lambda: a @ a, 20)


def main() -> None:
    context = context_bytes()
    work = [("3B", 4, 4096), ("3B", 1, 16384), ("8B", 4, 4096), ("8B", 1, 32768), ("8B", 1, 65536)]
    layers = [layer(*case) for case in work]
    heads = [head(*case) for case in [("3B", 1024), ("3B", 2048), ("8B", 2048)]]
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    json.dump(
        {
            "what": "memory and time of one transformer block",
            "hardware": torch.cuda.get_device_name(), "date": time.strftime("%Y-%m-%d"),
            "commit": commit.stdout.strip(), "command": "python bench/bench_block_memory.py",
            "torch": torch.__version__, "transformers": transformers.__version__,
            "matmul_flops": matmul(), "context": context, "layers": layers, "heads": heads,
        },
        sys.stdout, indent=1,
    )  # fmt: skip


if __name__ == "__main__":
    main()
