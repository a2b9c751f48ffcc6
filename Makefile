# Penstock: every target sets up what it needs in .venv. No root, no GPU.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
NATIVE_TESTS := build/native-tests
# Processes that share the tests, whole files at a time: most of a test is one thread of Python.
JOBS   ?= 2

CSRC    := $(wildcard csrc/*.cpp csrc/*.h)
CXX_ALL := $(CSRC) $(wildcard tests/native/*.cpp tests/native/*.h)

.PHONY: help demo test test-long test-browser test-vm fuzz lint format bench bench-storage bench-plans bench-gpu \
        bench-peers clean
help:
	@echo "make demo      fine-tune a small model under a small budget, in two minutes on two cores"
	@echo "make test      build and run the tests (no GPU, no root)"
	@echo "make test-long campaigns of many minutes: races in the engine"
	@echo "make test-browser the report in headless Chromium, where it is installed"
	@echo "make test-vm   the placement suite in a VM with CXL memory (Debian)"
	@echo "make fuzz      10^6 mutated store headers, and safetensors ones, against their parsers"
	@echo "make lint      ruff, mypy --strict, clang-format"
	@echo "make bench     speed of placement and the native core, ratios in one run"
	@echo "make bench-gpu whole steps on a GPU, part by part; make bench-peers: beside the peers"
	@echo "make format    rewrite the sources in house style"

$(VENV)/tools: requirements/dev.txt requirements/constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Penstock needs Python 3.11 or newer; set PYTHON=python3.11 or the like" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	  { echo "python3 -m venv failed; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements/dev.txt -c requirements/constraints.txt
	@touch $@

# Editable: Python is read from src/, only the native core needs a rebuild.
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
	$(BIN)/python -m pytest --timeout 300 -n $(JOBS) --dist loadfile \
	  -m "not gpu and not vm and not long and not browser" $(ARGS)

test-long: $(VENV)/built
	$(BIN)/python -m pytest --timeout 300 -m long $(ARGS)

test-browser: $(VENV)/built
	$(BIN)/python -m pytest --timeout 300 -m browser $(ARGS)

test-vm: $(VENV)/built
	tests/vm/run.sh $(ARGS)

fuzz: $(VENV)/built
	PYTHONPATH=. $(BIN)/python tests/fuzz/header.py $(ARGS)
	PYTHONPATH=. $(BIN)/python tests/fuzz/safetensors.py $(ARGS)

lint: $(VENV)/tools
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CXX_ALL)

format: $(VENV)/tools
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_ALL)

bench: $(VENV)/built
	$(BIN)/python bench/bench_placement.py $(ARGS)

bench-storage: $(VENV)/built
	$(BIN)/python bench/bench_storage.py $(ARGS)

# Needs no GPU, and half an hour: planning on the GPU's machine would cost its time.
bench-plans: $(VENV)/built
	$(BIN)/python bench/gpu_table.py --plan-only $(ARGS)
	$(BIN)/python bench/peers/memascend.py --plan-only $(ARGS)

# Each part is under ten minutes a call; a call begins with what the last one did not start.
PART ?= fast long disk curve moments 32b
bench-gpu: $(VENV)/built
	@for part in $(PART); do while :; do \
	  $(BIN)/python bench/gpu_table.py --part $$part $(ARGS) && break; [ $$? -eq 3 ] || exit 1; \
	done; done

CALL ?= dram others disk
bench-peers: $(VENV)/built
	@[ -d carry/peers ] || $(BIN)/python bench/peers/fetch.py carry/peers
	@for call in $(CALL); do PYTHONPATH=carry/peers $(BIN)/python bench/gpu_table.py \
	  --part peers --call $$call $(ARGS) || exit 1; done

clean:
	rm -rf build $(VENV)
