# make run ARGS="norm=rms placement=pre"   trains one cell; make test runs the tests. Both set everything up first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

export OMP_NUM_THREADS ?= 1

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,parallel,dashboard]'
	touch $@

.PHONY: install run test test-slow test-gpu test-slurm lint
install: $(READY)

run: $(READY)
	@$(BIN)/python -m normexp.train $(ARGS)

test: $(READY)
	$(BIN)/python -m pytest -q -n 2 --durations=10

test-slow: $(READY)
	$(BIN)/python -m pytest -q -m "slow and not gpu and not slurm"

test-gpu: $(READY)
	$(BIN)/python -m pytest -q -m gpu

test-slurm: $(READY)
	$(BIN)/python -m pytest -q -m slurm

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
