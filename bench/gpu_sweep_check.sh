#!/usr/bin/env bash
# The GPU's sweep on a machine that has one: build, the tests marked gpu, the benchmark; then, if
# `convergence` is given, the convergence study on all CPUs. Needs torch, triton, pytest, nanobind,
# scikit-build-core, CMake and ninja; fetches nothing. Results go to $BENCH_RESULTS if it is set.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD"
failed=0

python3 -m pip install -q --no-build-isolation --no-deps . || exit 1
python3 - <<'PY' || exit 1
import torch, triton
print("torch", torch.__version__, "triton", triton.__version__, torch.cuda.get_device_name())
PY

# An own configuration: the project's asks for plugins that such a machine may lack.
config=$(mktemp -d)
trap 'rm -rf "$config"' EXIT
printf '[pytest]\nmarkers =\n  gpu: needs a CUDA device\n  timeout: of pytest-timeout\n' > "$config/pytest.ini"
timeout 200 python3 -m pytest -q -ra --maxfail=8 --tb=short -c "$config/pytest.ini" --rootdir="$PWD" \
  --import-mode=importlib -p no:cacheprovider --noconftest -m gpu tests/test_device_sweep.py || failed=1

timeout 100 python3 bench/bench_device_sweep.py || failed=1

if [ "${1:-}" = convergence ]; then
  OMP_NUM_THREADS=1 timeout 540 python3 bench/convergence.py --seeds 0 1 2 3 4 --steps 3000 --jobs "$(nproc)" || failed=1
fi
exit "$failed"
