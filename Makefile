# Everything runs in .venv, which the first target that needs it makes from constraints.txt.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BUDGET ?= 160

BIN := .venv/bin
STAMP := .venv/.installed
CACHE := .venv/.cache
SOURCES := src tests examples benchmarks
TORCH := $(shell sed -n 's/^torch==/torch==/p' constraints.txt)

# The copy of pyright that comes with its package: nothing is downloaded when it runs.
export PYRIGHT_PYTHON_USE_BUNDLED_PYRIGHT := 1
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.PHONY: help setup demo test check lint-imports bench clean

help:
	@echo "make demo    compare the two GPT-2 examples (about three minutes after the install)"
	@echo "make test    the tests and the import contracts"
	@echo "make check   ruff, pyright, import contracts, codespell"
	@echo "make bench   how well the verdicts hold on this machine (long)"

setup: $(STAMP)

# torch comes first and by its exact version: left to a range, pip would take the newest one and, on Linux, gigabytes
# of CUDA libraries with it even where a smaller build of the pinned version is at hand.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || "$(PYTHON)" -m venv .venv
	$(BIN)/python -m pip install $(TORCH)
	$(BIN)/python -m pip install -c constraints.txt -e ".[hf,swarm,dev]"
	touch $@

demo: $(STAMP)
	$(BIN)/bareloop compare --budget $(BUDGET) examples/gpt2_trainer.py examples/gpt2_loop.py

# The loop's tests judge bits and counts, so they may run side by side; the clinic's have processes of their own to time.
# The swarm's are by themselves for what hivemind and torchft leave open in a process.
LOOP_TESTS := tests/trainer tests/data
SWARM_TESTS := tests/swarm tests/test_upstream.py

# A worker that a test has hung is not replaced: the next would hang in the same test.
SIDE_BY_SIDE := --numprocesses 2 --dist loadfile --max-worker-restart 0

test: $(STAMP) lint-imports
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(SIDE_BY_SIDE) $(LOOP_TESTS)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(SIDE_BY_SIDE) $(SWARM_TESTS)
	$(BIN)/python -m pytest $(LOOP_TESTS:%=--ignore=%) $(SWARM_TESTS:%=--ignore=%)

check: $(STAMP) lint-imports
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/pyright
	$(BIN)/codespell

lint-imports: $(STAMP)
	$(BIN)/lint-imports --cache-dir $(CACHE)/import-linter

bench: $(STAMP)
	$(BIN)/python benchmarks/probe_overhead.py
	$(BIN)/python benchmarks/sick_scripts.py
	$(BIN)/python benchmarks/trainer_overhead.py
	$(BIN)/python benchmarks/packing.py
	$(BIN)/python benchmarks/accumulation.py
	$(BIN)/python benchmarks/swarm_failures.py --engine hivemind torchft --runs 10
	for condition in 5ms-idle 50ms-idle 5ms-busy 50ms-busy; do \
		$(BIN)/python benchmarks/verdicts.py --condition $$condition --minutes 60 || exit 1; \
	done

clean:
	rm -rf .venv
