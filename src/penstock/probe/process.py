"""Measure the host memory of a process that trains: Python, PyTorch, CUDA and the compiler.

A plan's budgets cover what Penstock allocates for a model. The process around it needs memory of
its own, and how much depends on the machine: the GPU's kernels, the libraries, the number of
compiler processes. So a child process loads the same things, and the OS counts its memory.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading

from penstock.errors import ProbeError
from penstock.machine.sysfs import System
from penstock.memory.process import tree_nbytes

SECONDS = 120.0
"""Time limit for the child to load everything. Compiling the first kernel takes 5 to 20 s."""

_CPU = """
import sys, torch, transformers
transformers.LlamaForCausalLM  # naming it imports its modules
import penstock.optim
"""

_GPU = """
# The first product loads cuBLAS, and the first compilation the compiler and its worker processes.
x = torch.randn(256, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
def layer(x):
    return torch.nn.functional.silu(x @ x).sum()
try:
    torch.compile(layer)(x).backward()
except Exception:
    layer(x).backward()  # without a compiler, training does not compile either
torch.cuda.synchronize()
"""

_WAIT = """
print("ready", flush=True)
sys.stdin.readline()
"""


def measure_process(*, gpu: bool, system: System | None = None) -> int:
    """Return the host memory of a process that has loaded what a run loads, in bytes.

    With `gpu`, it has also started CUDA and compiled a function for the GPU. Memory of worker
    processes of the compiler is included. Raises ProbeError if the child fails.
    """
    program = _CPU + (_GPU if gpu else "") + _WAIT
    with (
        tempfile.TemporaryFile("w+") as errors,  # a pipe that nobody reads could fill up
        subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
        ) as child,
    ):  # fmt: skip
        assert child.stdout is not None
        timer = threading.Timer(SECONDS, child.kill)
        timer.start()
        try:
            ready = child.stdout.readline()
            nbytes = tree_nbytes(child.pid, system or System())
            child.communicate("go\n", timeout=SECONDS)
        except BaseException:
            child.kill()
            raise
        finally:
            timer.cancel()
        if not ready:
            errors.seek(0)
            last = (errors.read().strip().splitlines() or ["no message"])[-1]
            raise ProbeError(f"the process ended with exit code {child.returncode}: {last}")
    if not nbytes:
        raise ProbeError("the kernel does not report the memory of a process (smaps_rollup)")
    return nbytes
