# Two environments: .venv runs and tests the driver, .venv-lint holds the tools that read it.
PYTHON ?= python3
VENV := .venv
LINT := .venv-lint
PY := $(VENV)/bin/python
# One process builds an environment at a time; the stamp follows pyproject.toml.
STAMP := $(VENV)/.stamp
LINT_STAMP := $(LINT)/.stamp

.PHONY: help setup demo test lint bench proto clean
help:
	@echo "make demo   set up, then walk through the main job on a simulated node (no GPU, no Kubernetes)"
	@echo "make test   set up, then run linters' contracts and all tests"
	@echo "make lint   ruff, mypy, import-linter"
	@echo "make bench  figures beside their budgets"
	@echo "make proto  regenerate dra/pb from proto/"

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q --upgrade "pip>=25.1"
	$(PY) -m pip install -q -e . --group test --group proto
	$(PY) -m compileall -q dra $(VENV)/lib >/dev/null 2>&1 || true
	@touch $@

$(LINT_STAMP): pyproject.toml
	$(PYTHON) -m venv $(LINT)
	$(LINT)/bin/python -m pip install -q --upgrade "pip>=25.1"
	$(LINT)/bin/python -m pip install -q --group lint
	@touch $@

setup: $(STAMP)

demo: $(STAMP)
	@$(VENV)/bin/dra sim demo

lint: $(STAMP) $(LINT_STAMP)
	$(LINT)/bin/ruff check .
	$(LINT)/bin/ruff format --check .
	$(LINT)/bin/mypy --python-executable $(PY)
	PYTHONPATH=. $(LINT)/bin/lint-imports --no-cache

test: lint
	$(PY) -m pytest

bench: $(STAMP)
	@$(PY) -m compileall -q dra >/dev/null 2>&1 || true
	$(PY) -m tests.bench

proto: $(STAMP)
	$(PY) proto/generate.py

clean:
	rm -rf $(VENV) $(LINT) .mypy_cache .ruff_cache .hypothesis
