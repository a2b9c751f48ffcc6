#!/bin/bash
# Runs the tests marked `vm`: those of memory in each of three guests, in the first also the placement
# conformance suite with tensors and the engine with states striped over its nodes; those of disks
# in a guest of their own. `make test-vm` starts this.
#
#   tests/vm/run.sh [PYTEST_ARGUMENT...]
#
# PENSTOCK_VM_MODES are the guests (default all); PENSTOCK_VM_TIMEOUT is the seconds that each may
# take (default 1500).
# Exit codes: 0 every guest passed, 77 the guest cannot be had on this machine, 1 anything else.
set -uo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$here/../.." || exit 1
python=.venv/bin/python
readonly NO_TESTS_RAN=5 # pytest's own code for it

[[ -x $python ]] || { echo "vm: $python is missing; \`make test-vm\` builds it" >&2; exit 1; }
"$here/setup.sh" || exit $?

results=$(mktemp -d)
launcher=
trap 'rm -rf "$results"' EXIT
# The launcher runs in the background, or a signal would wait here until it ended by itself.
trap 'kill -TERM $launcher 2> /dev/null; wait $launcher; exit 143' INT TERM HUP

# pytest calls a run in which every test was skipped a success; here it has proved nothing.
count_tests_run() { # JUNIT_XML
  "$python" - "$1" <<'END'
import sys
import xml.etree.ElementTree as ElementTree

suites = list(ElementTree.parse(sys.argv[1]).iter("testsuite"))
print(sum(int(suite.get("tests", 0)) - int(suite.get("skipped", 0)) for suite in suites))
END
}

# Reserved huge pages on every node, so that huge='2M' is tried too: nothing else uses this machine.
readonly RESERVE='for n in /sys/devices/system/node/node[0-9]*; do
  [ ! -e $n/hugepages ] || echo 16 > $n/hugepages/hugepages-2048kB/nr_hugepages; done'

readonly DISKS=tests/vm/test_guest_disks.py

run_mode() { # MODE PYTEST_ARGUMENT...
  local mode=$1 started=$SECONDS code tests_run=0 suites=(tests/vm --ignore="$DISKS")
  shift
  # The emulated CXL device is too slow for every backing of every place; one guest has them all.
  case $mode in
    numa) suites+=(tests/conformance/test_placement.py tests/equivalence/test_striped.py) ;;
    disks) suites=("$DISKS") ;;
  esac
  "$here/launch.py" --timeout "${PENSTOCK_VM_TIMEOUT:-1500}" --out "$results" "$mode" -- \
    bash -c "$RESERVE"'; exec "$@"' run "$python" -m pytest -p no:cacheprovider -q --timeout 900 \
    --junitxml="$results/$mode.xml" "${suites[@]}" "$@" &
  launcher=$!
  wait $launcher
  code=$?
  if [[ -s $results/$mode.xml ]]; then
    tests_run=$(count_tests_run "$results/$mode.xml")
    if ((code == 0 && tests_run == 0)); then code=$NO_TESTS_RAN; fi
  fi
  echo "vm: $mode: $((SECONDS - started)) s, $tests_run tests run, exit code $code"
  return $code
}

failed=()
for mode in ${PENSTOCK_VM_MODES:-numa cxl cxlperf disks}; do
  run_mode "$mode" "$@" || failed+=("$mode")
done
if ((${#failed[@]})); then
  echo "vm: failed in: ${failed[*]}" >&2
  exit 1
fi
