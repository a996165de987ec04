# Everything runs in .venv/, made here from $(PYTHON). It is installed again only when pyproject.toml
# or constraints.txt changed. Which build of torch is fetched (CPU or CUDA) is pip's configuration.

PYTHON ?= python3
PROFILE ?= transformer.profile.yaml
JOBS ?= 2

VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

.PHONY: help
help:  ## List the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' Makefile

# -- environment: two sizes, each with a stamp that says what is installed ------------------------

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo-installed: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e '.[torch,examples]'
	@touch $@

$(VENV)/.all-installed: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e '.[torch,tensorflow,examples,dev]'
	@touch $@ $(VENV)/.demo-installed

# -- use ------------------------------------------------------------------------------------------

.PHONY: demo
demo: $(VENV)/.demo-installed  ## Tune a small transformer on this machine (PyTorch, real data).
	$(BIN)/autoprec tune examples/torch/transformer.py --output $(PROFILE)

# -- checks ---------------------------------------------------------------------------------------

.PHONY: test
test: lint types tests  ## Run every check: format, lint, types, all tests. What CI runs.

.PHONY: lint
lint: $(VENV)/.all-installed  ## Check format and lint.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

.PHONY: types
types: $(VENV)/.all-installed  ## Check types (mypy, strict).
	$(BIN)/mypy

# One process with both torch and TensorFlow is fragile, so each framework's tests have processes of
# their own; tests/conftest.py keeps the other framework's files from being imported. Any part that
# fails, or that finds no test at all (pytest's exit code 5), fails the target. $(JOBS) files run at a
# time, each process with one thread, in the order of tests/conftest.py: those that take long first.
SIDE_BY_SIDE := OMP_NUM_THREADS=1 $(PYTEST) -n $(JOBS) --dist loadfile --no-loadscope-reorder

.PHONY: tests
tests: $(VENV)/.all-installed  ## Run the tests, each framework's in processes of its own.
	$(SIDE_BY_SIDE) -m "not torch and not keras and not gpu"
	$(SIDE_BY_SIDE) -m "torch and not gpu"
	$(SIDE_BY_SIDE) -m "keras and not gpu"

# Exit code 5, no test found, is accepted for Keras alone, which has no GPU tests: TensorFlow that sees
# a GPU is not part of this environment on every machine.
.PHONY: test-gpu
test-gpu: $(VENV)/.all-installed  ## Run the tests that need a CUDA device.
	$(PYTEST) -m "gpu and not keras"
	$(PYTEST) -m "gpu and keras" || [ $$? -eq 5 ]

# Mutants run in build/mutants/. One module: make mutants MODULE=core/speed/selection.py. All of them: hours.
.PHONY: mutants
mutants: $(VENV)/.all-installed  ## How many small faults in core/ its tests find, by module (MODULE=core/speed/selection.py).
	$(BIN)/python tests/mutants.py $(MODULE)

.PHONY: format
format: $(VENV)/.all-installed  ## Format the code and mend what lint can mend.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# -- measurements ---------------------------------------------------------------------------------

# For machines that are lent and have what they have: this one target takes the Python that is there
# ($(PYTHON) where .venv/ is not) and installs nothing. More by EVIDENCE='--only tests --again'.
.PHONY: gpu-evidence
gpu-evidence:  ## What a CUDA GPU brings, in ten minutes; installs nothing.
	PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" \
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) benchmarks/gpu_evidence.py $(EVIDENCE)

.PHONY: bench
bench: $(VENV)/.all-installed  ## Start-up, replays, the oracle, and the overhead of a step (hours).
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/replay.py
	$(BIN)/python benchmarks/oracle.py
	$(BIN)/python benchmarks/overhead.py

.PHONY: oracle
oracle: $(VENV)/.all-installed  ## The tuner against an exhaustive search, measured at this commit (hours).
	$(BIN)/python benchmarks/oracle.py

.PHONY: overhead
overhead: $(VENV)/.all-installed  ## What apply_profile costs a step, in PyTorch and Keras (an hour).
	$(BIN)/python benchmarks/overhead.py

.PHONY: holdout
holdout: $(VENV)/.all-installed  ## Six tasks that no change was developed on; once for a release.
	$(BIN)/python benchmarks/holdout.py

.PHONY: peers
peers: $(VENV)/.all-installed  ## The tuner beside Lightning, accelerate and pytorch-autotune (long).
	$(INSTALL) -e '.[peers]'
	$(BIN)/python benchmarks/peers.py

.PHONY: null
null: $(VENV)/.all-installed  ## How often a speed-up is claimed between recipes that are the same (half an hour).
	$(BIN)/python benchmarks/null.py --simulated 200
	$(BIN)/python benchmarks/null.py --simulated 200 --policies 4
	$(BIN)/python benchmarks/null.py

.PHONY: keep-memory
keep-memory: $(VENV)/.all-installed  ## What keeping freed memory brings (minutes).
	$(BIN)/python benchmarks/keep_memory.py

.PHONY: after-others
after-others: $(VENV)/.all-installed  ## Whether a Keras recipe's speed depends on what ran before it (minutes).
	$(BIN)/python benchmarks/after_others.py

.PHONY: compiled
compiled: $(VENV)/.all-installed  ## What torch.compile brings, and after how many steps (long).
	$(BIN)/python benchmarks/compiled.py

.PHONY: growth
growth: $(VENV)/.all-installed  ## How tuning time grows with the model, the knobs and the batches (long).
	$(BIN)/python benchmarks/growth.py

.PHONY: soak
soak: $(VENV)/.all-installed  ## Tunings under 220 injected faults, four seeds; what was lost (long).
	$(BIN)/python benchmarks/soak.py

.PHONY: fuzz
fuzz: $(VENV)/.all-installed  ## 100,000 profile and 10,000 catalogue files, mutated.
	$(BIN)/python benchmarks/fuzz.py

.PHONY: clean
clean:  ## Remove the environment, caches and build products.
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +
