#!/bin/bash
# Runs the tests marked `vm`; called by `make test-vm`. The memory tests run in three guests. The first
# guest also runs the placement conformance suite with tensors, and the engine with states striped over
# its nodes. The disk tests run in a fourth guest.
#
#   tests/vm/run.sh [PYTEST_ARGUMENT...]
#
# PENSTOCK_VM_MODES lists the guests (default: all). PENSTOCK_VM_JOBS is the number of concurrent guests
# (default: 2; a guest uses little more than one core). PENSTOCK_VM_TIMEOUT is the limit of each guest
# in seconds (default: 1500).
# Exit codes: 0 every guest passed, 77 the guest is not available on this machine, 1 anything else.
set -uo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$here/../.." || exit 1
python=.venv/bin/python
readonly NO_TESTS_RAN=5 # pytest's exit code for this

[[ -x $python ]] || { echo "vm: $python is missing; \`make test-vm\` builds it" >&2; exit 1; }
"$here/setup.sh" || exit $?

# Compile modules here: compiling in the guest is twenty times slower.
"$python" -m compileall -q src tests || exit 1

results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT
# Guests run in the background, because bash handles a signal only when a foreground command has ended.
trap 'kill -TERM $(jobs -p) 2> /dev/null; wait; exit 143' INT TERM HUP

# pytest reports success if every test was skipped. Here that counts as a failure.
count_tests_run() { # JUNIT_XML
  "$python" - "$1" <<'END'
import sys
import xml.etree.ElementTree as ElementTree

suites = list(ElementTree.parse(sys.argv[1]).iter("testsuite"))
print(sum(int(suite.get("tests", 0)) - int(suite.get("skipped", 0)) for suite in suites))
END
}

# Reserve huge pages on every node, so that huge='2M' is tested too. Nothing else uses this machine.
readonly RESERVE='for n in /sys/devices/system/node/node[0-9]*; do
  [ ! -e $n/hugepages ] || echo 16 > $n/hugepages/hugepages-2048kB/nr_hugepages; done'

readonly DISKS=tests/vm/test_guest_disks.py

run_mode() { # MODE PYTEST_ARGUMENT...
  local mode=$1 started=$SECONDS launcher='' code tests_run=0 suites=(tests/vm --ignore="$DISKS")
  shift
  # The emulated CXL device is too slow for the whole conformance suite; one guest runs it.
  case $mode in
    numa) suites+=(tests/conformance/test_placement.py tests/equivalence/test_striped.py) ;;
    disks) suites=("$DISKS") ;;
  esac
  trap 'kill -TERM $launcher 2> /dev/null; wait $launcher; exit 143' TERM
  "$here/launch.py" --timeout "${PENSTOCK_VM_TIMEOUT:-1500}" --out "$results" "$mode" -- \
    bash -c "$RESERVE"'; exec "$@"' run "$python" -m pytest -p no:cacheprovider -q --timeout 900 \
    --durations=5 --durations-min=10 --junitxml="$results/$mode.xml" "${suites[@]}" "$@" &
  launcher=$!
  wait $launcher
  code=$?
  if [[ -s $results/$mode.xml ]]; then
    tests_run=$(count_tests_run "$results/$mode.xml")
    if ((code == 0 && tests_run == 0)); then code=$NO_TESTS_RAN; fi
  fi
  echo "$((SECONDS - started)) s, $tests_run tests run, exit code $code"
  ((code)) || touch "$results/$mode.passed"
}

# Prefixes lines with the guest's mode, and drops QEMU's messages about the intentionally bad sectors.
label() { # MODE
  sed -u "s/qemu-system-x86_64: aio failed: .*\$//; T keep; /^\$/d; : keep; s/^/$1: /"
}

read -ra modes <<< "${PENSTOCK_VM_MODES:-numa cxl cxlperf disks}"
for mode in "${modes[@]}"; do
  while (($(jobs -rp | wc -l) >= ${PENSTOCK_VM_JOBS:-2})); do wait -n; done
  run_mode "$mode" "$@" 2>&1 | label "$mode" &
done
wait
failed=()
for mode in "${modes[@]}"; do
  [[ -e $results/$mode.passed ]] || failed+=("$mode")
done
if ((${#failed[@]})); then
  echo "vm: failed in: ${failed[*]}" >&2
  exit 1
fi
