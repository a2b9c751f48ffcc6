#!/usr/bin/env bash
# Test and measure the optimizer sweep on a machine with a GPU and many CPUs. Builds the package, then
# runs the parts given as arguments (default: gpu):
#   gpu           the tests marked gpu, and the benchmark (about 5 minutes)
#   host          the tests and the benchmark of the sweep on all CPUs (about 3 minutes)
#   probe         a full probe, written to $BENCH_RESULTS or here (about 3 minutes)
#   convergence   the convergence study on all CPUs (about 9 minutes)
# Needs torch, triton, pytest, nanobind, scikit-build-core, CMake and ninja, and downloads nothing.
# Results go to $BENCH_RESULTS if it is set.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD"
failed=0

python3 -m pip install -q --no-build-isolation --no-deps . || exit 1
python3 - <<'PY' || exit 1
import torch, triton
print("torch", torch.__version__, "triton", triton.__version__, torch.cuda.get_device_name())
PY

# Use a separate configuration: the project's needs plugins that such a machine may lack.
config=$(mktemp -d)
trap 'rm -rf "$config"' EXIT
printf '[pytest]\nmarkers =\n  gpu: needs a CUDA device\n  timeout: of pytest-timeout\n' > "$config/pytest.ini"
check() {
  timeout 200 python3 -m pytest -q -ra --maxfail=8 --tb=short -c "$config/pytest.ini" --rootdir="$PWD" \
    --import-mode=importlib -p no:cacheprovider --noconftest "$@" || failed=1
}

for part in "${@:-gpu}"; do
  case "$part" in
  gpu)
    check -m gpu tests/optim/test_device_sweep.py tests/optim/test_device_norms.py
    timeout 100 python3 bench/bench_device_sweep.py || failed=1
    ;;
  host)
    check tests/optim/test_sweep.py
    timeout 300 python3 bench/bench_sweep.py --rounds 11 || failed=1
    ;;
  probe)
    timeout 400 python3 - "${BENCH_RESULTS:-.}/machine.json" <<'PY' || failed=1
import sys
from penstock.probe import ProbeOptions, probe

result = probe(ProbeOptions())
result.machine.save(sys.argv[1])
print(*result.notes, sep="\n")
for node in result.machine.nodes:
    for r in node.rates:
        rate = r.bytes_per_second.median / 1e9
        print(node.id, r.operation, r.moments or "", r.parameters or "", r.threads, f"{rate:.1f} GB/s")
print(f"{result.seconds:.0f} s")
PY
    ;;
  convergence)
    OMP_NUM_THREADS=1 timeout 540 python3 bench/convergence.py --seeds 0 1 2 3 4 --steps 3000 --jobs "$(nproc)" || failed=1
    ;;
  *)
    echo "unknown part: $part" >&2
    failed=1
    ;;
  esac
done
exit "$failed"
