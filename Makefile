# Every target works from a bare clone: it makes .venv, installs the pinned packages once, and runs.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# The first interpreter between 3.10 and 3.13; choose another with `make PYTHON=python3.12 ...`.
PYTHON ?= $(shell for candidate in python3 python3.13 python3.12 python3.11 python3.10; do \
	"$$candidate" -c 'import ensurepip, sys, venv; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' \
		>/dev/null 2>&1 && { echo "$$candidate"; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check
CONSTRAINTS := requirements/constraints.txt
KERNELS := $(wildcard csrc/*.* csrc/*/*.*)
CODE := megadiff launch tests benchmarks setup.py

# Two ranks on two cores must not start two thread pools each as wide as the machine.
CPU_RUN := OMP_NUM_THREADS=1 DS_ACCELERATOR=cpu
PYTEST := $(CPU_RUN) $(BIN)/python -m pytest
# Tests run in so many processes at once (0: in one), some of which start up to four more.
TEST_WORKERS ?= 2
PYTEST_ARGS ?=

.PHONY: help install demo demo-long test test-slow check format format-check lint types layering build bench clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

install: $(STAMP)  ## make the virtual environment and install the pinned packages

# setuptools, wheel and torch come first, so that the one source package and the kernels in csrc build without an
# isolated environment, into which pip would fetch unpinned packages.
$(STAMP): pyproject.toml setup.py $(CONSTRAINTS) $(KERNELS)
	@[ -n "$(PYTHON)" ] || { echo "no Python from 3.10 to 3.13 with venv was found; install one or set PYTHON=..." >&2; exit 1; }
	[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet -c $(CONSTRAINTS) setuptools wheel py-cpuinfo torch
	$(PIP) install --quiet --no-build-isolation -c $(CONSTRAINTS) -e '.[dev,demo,int8,ocr]'
	@touch $@

demo: $(STAMP)  ## train, sample, judge and export a small DiT on two CPU ranks (under 10 minutes)
	$(CPU_RUN) $(BIN)/python launch/demo.py --config launch/configs/dit_demo.yaml --run-dir runs/demo

demo-long: $(STAMP)  ## the same at 32 pixels, for at most an hour: the picture in the README
	$(CPU_RUN) $(BIN)/python launch/demo.py --config launch/configs/dit_demo_long.yaml --run-dir runs/demo_long \
		--tensor-model-parallel-size 1

test: $(STAMP)  ## every test that is not slow
	$(PYTEST) -n $(TEST_WORKERS) --dist loadgroup -m 'not slow' $(PYTEST_ARGS)

test-slow: $(STAMP)  ## only the slow tests
	$(PYTEST) -n $(TEST_WORKERS) --dist loadgroup -m slow $(PYTEST_ARGS)

check: format-check lint types build test  ## all that a submission must pass (the layering test is among the tests)

format: $(STAMP)  ## rewrite the code as ruff formats it
	$(BIN)/ruff format $(wildcard $(CODE))
	$(BIN)/ruff check --fix-only --select I $(wildcard $(CODE))

format-check: $(STAMP)
	$(BIN)/ruff format --check $(wildcard $(CODE))

lint: $(STAMP)  ## ruff's rules
	$(BIN)/ruff check $(wildcard $(CODE))

types: $(STAMP)  ## mypy over megadiff, launch and the benchmarks (which run as scripts and import each other)
	$(BIN)/mypy
	MYPYPATH=benchmarks $(BIN)/mypy $(wildcard benchmarks/*.py benchmarks/*/*.py)

layering: $(STAMP)  ## imports point down only
	$(PYTEST) -q tests/test_layering.py

build: $(STAMP)  ## a wheel in build/dist
	$(PIP) wheel --quiet --no-deps --no-build-isolation --wheel-dir build/dist .

bench: $(STAMP)  ## every benchmark prints its table (hours)
	$(BIN)/python benchmarks/fashion_mnist.py
	for benchmark in benchmarks/*.py; do echo "== $$benchmark"; $(CPU_RUN) $(BIN)/python "$$benchmark"; done

clean:  ## remove what was built; runs/ and .venv stay
	rm -rf build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find megadiff launch tests -name __pycache__ -type d -prune -exec rm -rf {} +
