# Everything runs in .venv/, made here from $(PYTHON) and reinstalled only when pyproject.toml or
# constraints.txt changes. Which build of torch is fetched (CPU or CUDA) is up to pip's configuration.

PYTHON ?= python3
PROFILE ?= transformer.profile.yaml
JOBS ?= 2

VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
INSTALL := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt
# pip would compile with one core. Some packages hold files that are for other versions of Python; a
# quarter of all code are their own tests, and Transformers' models, of which few are imported.
COMPILE := $(BIN)/python -W ignore -m compileall -qq -j $(JOBS) \
	-x '/site-packages/(.*/tests|transformers/models)/' $(CURDIR)/$(VENV)/lib || true

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

.PHONY: help
help:  ## List the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-15s %s\n", $$1, $$2}' Makefile

# -- environment: two sizes, each with a stamp file when installed --------------------------------

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo-installed: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e '.[torch,examples]'
	@$(COMPILE)
	@touch $@

$(VENV)/.all-installed: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e '.[torch,tensorflow,examples,dev]'
	@$(COMPILE)
	@touch $@ $(VENV)/.demo-installed

$(VENV)/.docs-installed: $(VENV)/.all-installed
	$(INSTALL) -e '.[torch,tensorflow,examples,dev,docs]'
	@$(COMPILE)
	@touch $@

$(VENV)/.scale-installed: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e '.[torch,tensorflow,examples,dev,ray]'
	@$(COMPILE)
	@touch $@ $(VENV)/.all-installed $(VENV)/.demo-installed

$(VENV)/.integrations-installed: $(VENV)/.docs-installed
	$(INSTALL) -e '.[torch,tensorflow,examples,dev,docs,integrations]'
	@$(COMPILE)
	@touch $@

# -- use ------------------------------------------------------------------------------------------

.PHONY: demo
demo: $(VENV)/.demo-installed  ## Tune a small transformer on this machine (PyTorch, real data).
	$(BIN)/autoprec tune examples/torch/transformer.py --output $(PROFILE) --report

.PHONY: docs
docs: $(VENV)/.docs-installed  ## Build the documentation into build/docs (a warning is an error).
	$(BIN)/sphinx-build -q -W --keep-going -b html docs build/docs
	@echo "open build/docs/index.html"

# -- checks ---------------------------------------------------------------------------------------

.PHONY: test
test: lint types tests  ## Run the checks: format, lint, types, tests (ALSO="release scale slow zoo": as CI does).

# What takes long, or what other targets run, is left out, but for what ALSO names: CI's
# `ALSO="release scale slow zoo"` runs all of it in one schedule, where a long test of one kind leaves
# no process waiting.
ALSO :=
EVERY_DAY := not gpu and not integrations $(foreach m,$(filter-out $(ALSO),release scale slow zoo),and not $(m))
TESTS_INSTALLED := $(VENV)/.$(if $(filter scale,$(ALSO)),scale,all)-installed

.PHONY: lint
lint: $(TESTS_INSTALLED)  ## Check format and lint.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

.PHONY: types
types: $(TESTS_INSTALLED)  ## Check types (mypy, strict).
	$(BIN)/mypy --num-workers $(JOBS)

# One process with both torch and TensorFlow is fragile, so each framework's tests run in processes
# of their own; tests/conftest.py keeps the other framework's files from being imported. A part that
# fails, or that finds no test at all (pytest's exit code 5), fails the target. $(JOBS) files run at a
# time, each process with one thread; tests/conftest.py starts those with slow tests first.
ONE_THREAD := OMP_NUM_THREADS=1 TF_NUM_INTRAOP_THREADS=1 TF_NUM_INTEROP_THREADS=1
# Compiled modules are kept: hundreds of processes import them again.
unexport PYTHONDONTWRITEBYTECODE
RUN_FILES_IN_PARALLEL := $(ONE_THREAD) $(PYTEST) -n $(JOBS) --dist loadfile --no-loadscope-reorder \
	$(if $(ALSO),--durations=15)

.PHONY: check
check: lint types tests-plain  ## Run the checks of a minute: format, lint, types, and the tests without a framework.

.PHONY: tests tests-plain tests-torch tests-keras
tests: tests-plain tests-torch tests-keras  ## Run the tests, each framework's in processes of its own.

# Tests of clusters wait for most of their time: where they run, one file more does.
tests-plain: $(TESTS_INSTALLED)
	$(RUN_FILES_IN_PARALLEL) $(if $(filter scale,$(ALSO)),-n $$(($(JOBS) + 1))) -m "not torch and not keras and $(EVERY_DAY)"

tests-torch: $(TESTS_INSTALLED)
	$(RUN_FILES_IN_PARALLEL) -m "torch and $(EVERY_DAY)"

tests-keras: $(TESTS_INSTALLED)
	$(RUN_FILES_IN_PARALLEL) -m "keras and $(EVERY_DAY)"

# Each test starts several ranks or nodes, so one file runs at a time.
.PHONY: test-scale
test-scale: $(VENV)/.scale-installed  ## Run the tests that train on several devices or nodes (minutes).
	OMP_NUM_THREADS=1 $(PYTEST) -m "scale and not torch and not keras and not gpu"
	OMP_NUM_THREADS=1 $(PYTEST) -m "scale and torch and not gpu" || [ $$? -eq 5 ]
	OMP_NUM_THREADS=1 $(PYTEST) -m "scale and keras and not gpu" || [ $$? -eq 5 ]

# The longest proofs, of tasks whose truth long runs of loops by hand have shown.
.PHONY: test-zoo
test-zoo: $(VENV)/.all-installed  ## Prove a third of the tasks of known numerics and compare (minutes).
	$(RUN_FILES_IN_PARALLEL) -m "zoo and torch"
	$(RUN_FILES_IN_PARALLEL) -m "zoo and keras"

.PHONY: test-release
test-release: $(VENV)/.all-installed  ## Run the tests of packaging and of rehearsed accelerators (minutes).
	$(RUN_FILES_IN_PARALLEL) -m "release and not torch and not keras"
	$(RUN_FILES_IN_PARALLEL) -m "release and torch"
	$(RUN_FILES_IN_PARALLEL) -m "release and keras"

SLOW := slow and not gpu and not integrations and not release and not scale and not zoo
.PHONY: test-slow
test-slow: $(VENV)/.all-installed  ## Run the tests that take long each: whole tunings, faults for real (minutes).
	$(RUN_FILES_IN_PARALLEL) -m "$(SLOW) and not torch and not keras"
	$(RUN_FILES_IN_PARALLEL) -m "$(SLOW) and torch"
	$(RUN_FILES_IN_PARALLEL) -m "$(SLOW) and keras"

# The trainers' tests are marked `release`, so that CI runs them, too. Those of pages, the last ones,
# need a Chromium besides (Debian: apt install chromium).
.PHONY: test-integrations
test-integrations: $(VENV)/.integrations-installed  ## Run the tests with trainers (as CI does), a browser and experiment trackers.
	$(RUN_FILES_IN_PARALLEL) tests/integrations -m "torch and not gpu"
	$(RUN_FILES_IN_PARALLEL) tests/integrations -m "keras and not gpu"
	$(RUN_FILES_IN_PARALLEL) tests/integrations -m "not torch and not keras"

# Exit code 5 (no test found) is accepted for Keras only, which has no GPU tests: not every machine
# has a TensorFlow that sees its GPU.
.PHONY: test-gpu
test-gpu: $(VENV)/.all-installed  ## Run the tests that need a CUDA device.
	$(PYTEST) -m "gpu and not keras"
	$(PYTEST) -m "gpu and keras" || [ $$? -eq 5 ]

# Mutants run in build/mutants/. One module: make mutants MODULE=core/speed/selection.py. All of them: some minutes.
.PHONY: mutants
mutants: $(VENV)/.all-installed  ## Count the small faults in core/ that its tests find (MODULE=core/speed/selection.py).
	$(BIN)/python tests/mutants.py $(MODULE)

.PHONY: format
format: $(VENV)/.all-installed  ## Format the code and fix what lint can fix.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# -- measurements ---------------------------------------------------------------------------------

# For borrowed machines, where nothing can be installed: this target uses the Python that is there
# ($(PYTHON) if there is no .venv/). Options: EVIDENCE='--only tests --again'.
.PHONY: gpu-evidence
gpu-evidence:  ## Measure what a CUDA GPU brings, in ten minutes; installs nothing.
	PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" \
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m benchmarks.gpu.evidence $(EVIDENCE)

.PHONY: bench
bench: $(VENV)/.all-installed  ## Measure start-up, replays, one task against an exhaustive search, and the overhead of a PyTorch step (half an hour).
	$(BIN)/python -m benchmarks.overhead.startup
	$(BIN)/python -m benchmarks.search.replay
	$(BIN)/python -m benchmarks.search.oracle --tasks encoder
	$(BIN)/python -m benchmarks.overhead.compare --ways torch --rounds 2 --seconds 0.7

.PHONY: oracle
oracle: $(VENV)/.all-installed  ## Compare the tuner with an exhaustive search at this commit (hours).
	$(BIN)/python -m benchmarks.search.oracle

.PHONY: overhead
overhead: $(VENV)/.all-installed  ## Measure what apply_profile costs per step, in PyTorch and Keras (an hour).
	$(BIN)/python -m benchmarks.overhead.compare

.PHONY: holdout
holdout: $(VENV)/.all-installed  ## Tune six tasks that no change was developed on; once for a release.
	$(BIN)/python -m benchmarks.profiles.holdout

.PHONY: peers
peers: $(VENV)/.all-installed  ## Compare the tuner with Lightning, accelerate and pytorch-autotune (long).
	$(INSTALL) -e '.[peers]'
	$(BIN)/python -m benchmarks.peers.compare

.PHONY: false-speedups
false-speedups: $(VENV)/.all-installed  ## Count speed-ups claimed between identical recipes (half an hour).
	$(BIN)/python -m benchmarks.search.false_speedups --simulated 200
	$(BIN)/python -m benchmarks.search.false_speedups --simulated 200 --policies 4
	$(BIN)/python -m benchmarks.search.false_speedups

.PHONY: keep-memory
keep-memory: $(VENV)/.all-installed  ## Measure what keeping freed memory brings (minutes).
	$(BIN)/python -m benchmarks.ablations.keep_memory
	$(BIN)/python -m benchmarks.ablations.memory_growth

.PHONY: worker-history
worker-history: $(VENV)/.all-installed  ## Test whether a Keras recipe's speed depends on what ran before it (minutes).
	$(BIN)/python -m benchmarks.ablations.worker_history

.PHONY: compiled
compiled: $(VENV)/.all-installed  ## Measure what torch.compile brings, and after how many steps (long).
	$(BIN)/python -m benchmarks.ablations.compiled

.PHONY: growth
growth: $(VENV)/.all-installed  ## Measure how tuning time grows with the model, knobs and batches (long).
	$(BIN)/python -m benchmarks.search.growth

.PHONY: soak
soak: $(VENV)/.all-installed  ## Inject 220 faults into tunings and count what was lost (long).
	$(BIN)/python -m benchmarks.faults.soak

.PHONY: fuzz
fuzz: $(VENV)/.all-installed  ## Load 100,000 mutated profiles and 10,000 mutated catalogue files.
	$(BIN)/python -m benchmarks.faults.fuzz

.PHONY: clean
clean:  ## Remove the environment, caches and build products.
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +
