# Every target installs what it needs into .venv. None needs root; only test-gpu, bench-gpu and bench-peers need a GPU.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
NATIVE_TESTS := build/native-tests
# Number of test processes. Each runs whole test files.
JOBS   ?= 2
# One thread for torch: the processes have a core each, and tiny kernels gain nothing from more. Compiled Python files
# are written even where the environment says otherwise: every child process would compile them again.
TEST_ENV := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=

CSRC    := $(wildcard csrc/*.cpp csrc/*.h)
CXX_ALL := $(CSRC) $(wildcard tests/native/*.cpp tests/native/*.h)

.PHONY: help demo test test-long test-browser test-gpu test-vm fuzz campaign mutate lint format docs bench bench-storage \
        bench-plans bench-gpu bench-peers clean
help:
	@echo "make demo          fine-tune a small model under a small memory budget (about three minutes on two cores)"
	@echo "make test          build and run the tests; needs no GPU and no root"
	@echo "make test-long     run the long tests: many seeds, many kills, every model under every plan"
	@echo "make test-browser  test the report page in headless Chromium, if it is installed"
	@echo "make test-gpu      run the tests that need a GPU, in parallel processes"
	@echo "make test-vm       test placement in a virtual machine with NUMA nodes and CXL memory (Debian hosts)"
	@echo "make fuzz          run a million mutated store and safetensors headers through their parsers"
	@echo "make campaign      kills, power cuts, flipped bits, failing disks, concurrent runs, fuzzed inputs; about an hour"
	@echo "make mutate        change the code in small ways and see whether a test fails; half an hour"
	@echo "make lint          check with ruff, mypy --strict and clang-format"
	@echo "make format        reformat the sources with ruff and clang-format"
	@echo "make docs          build the documentation site into build/site"
	@echo "make bench         measure memory placement against plain torch"
	@echo "make bench-storage measure the store against fio"
	@echo "make bench-plans   make the plans that the GPU benchmarks need; half an hour, no GPU"
	@echo "make bench-gpu     measure whole training steps on a GPU"
	@echo "make bench-peers   measure Penstock, DeepSpeed, FSDP2 and RoundPipe on the same work; needs a GPU"
	@echo "make clean         remove .venv and build/"

$(VENV)/tools: requirements/dev.txt requirements/constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Penstock needs Python 3.11 or newer; set PYTHON=python3.11 or the like" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	  { echo "python3 -m venv failed; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements/dev.txt -c requirements/constraints.txt
	@touch $@

# An editable install: Python reads src/ directly, so only changes to csrc/ need a rebuild.
$(VENV)/built: $(VENV)/tools CMakeLists.txt pyproject.toml $(CSRC)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/pip install --quiet --disable-pip-version-check \
	  --no-build-isolation --no-deps -e .
	@touch $@

$(NATIVE_TESTS)/native_tests: $(VENV)/tools CMakeLists.txt $(CXX_ALL)
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake -S . -B $(NATIVE_TESTS) -G Ninja -DPENSTOCK_NATIVE_TESTS=ON >/dev/null
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake --build $(NATIVE_TESTS)

demo: $(VENV)/built
	@$(BIN)/python examples/demo.py $(ARGS)

test: $(VENV)/built $(NATIVE_TESTS)/native_tests
	$(TEST_ENV) $(BIN)/python -m pytest --timeout 300 -n $(JOBS) --dist loadfile --no-loadscope-reorder \
	  -m "not gpu and not vm and not long and not browser" $(ARGS)

test-long: $(VENV)/built
	$(BIN)/python -m pytest --timeout 300 -m "long and not gpu" $(ARGS)

test-browser: $(VENV)/built
	$(BIN)/python -m pytest --timeout 300 -m browser $(ARGS)

# GPU_PYTHON=python3 uses a Python that has torch and penstock already, such as the one of a GPU machine without network.
GPU_PYTHON ?= $(BIN)/python
test-gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(VENV)/built)
	$(GPU_PYTHON) tests/gpu/run.py $(ARGS)

test-vm: $(VENV)/built
	tests/vm/run.sh $(ARGS)

fuzz: $(VENV)/built
	PYTHONPATH=. $(BIN)/python tests/fuzz/fuzz_header.py $(ARGS)
	PYTHONPATH=. $(BIN)/python tests/fuzz/fuzz_safetensors.py $(ARGS)

# ARGS="--kind kills --cases 50 --seed 20260101" for a part of it; the seed is the date by default. A later call with the
# same seed continues. Power cuts need root.
campaign: $(VENV)/built
	$(BIN)/python -m tests.campaign $(ARGS) || failed=1; \
	  $(BIN)/python -m tests.campaign --summary $(ARGS) || failed=1; exit $${failed:-0}

# ARGS="--minutes 30 --only engine/" for a part of it. The first run records which test runs which line; after new tests,
# ARGS="--map tests/FILE" records theirs.
mutate: $(VENV)/built
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.mutation.run $(ARGS)

lint: $(VENV)/tools
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CXX_ALL)

format: $(VENV)/tools
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_ALL)

$(VENV)/docs-tools: $(VENV)/tools requirements/docs.txt requirements/docs-constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements/docs.txt \
	  -c requirements/constraints.txt -c requirements/docs-constraints.txt
	@touch $@

docs: $(VENV)/built $(VENV)/docs-tools
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "build/site/index.html; for its search: $(BIN)/python -m http.server -d build/site"

bench: $(VENV)/built
	$(BIN)/python bench/bench_placement.py $(ARGS)

bench-storage: $(VENV)/built
	$(BIN)/python bench/bench_storage.py $(ARGS)

# Plans are made in advance, without a GPU, so that no GPU time is spent on planning.
bench-plans: $(VENV)/built
	$(BIN)/python bench/gpu_table.py --plan-only $(ARGS)
	$(BIN)/python bench/peers/memascend.py --plan-only $(ARGS)

# Each call takes under ten minutes and exits with code 3 when work is left; the next call continues.
PART ?= fast long disk curve moments 32b
bench-gpu: $(VENV)/built
	@for part in $(PART); do while :; do \
	  $(BIN)/python bench/gpu_table.py --part $$part $(ARGS) && break; [ $$? -eq 3 ] || exit 1; \
	done; done

CALL ?= torch dram others disk
bench-peers: $(VENV)/built
	@[ -d carry/peers ] || $(BIN)/python bench/peers/fetch.py carry/peers
	@for call in $(CALL); do PYTHONPATH=carry/peers $(BIN)/python bench/gpu_table.py \
	  --part peers --call $$call $(ARGS) || exit 1; done

clean:
	rm -rf build $(VENV)
