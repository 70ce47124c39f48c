# Every target creates what it needs: the virtual environment appears on first use and again when pyproject.toml changes.
PYTHON ?= python3
VENV ?= .venv
# The requirement for torch alone, options of pip included: name a CPU-only index here to avoid a CUDA build.
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
STAMP := $(VENV)/.dsv4-setup

.PHONY: help setup serve test test-unit test-server lint format bench clean

help: ## Show the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

setup: $(STAMP) ## Create the virtual environment with everything in it

$(STAMP): pyproject.toml
	bash docker/install.sh $(PYTHON) $(VENV) "$(TORCH)" dev
	touch $(STAMP)

serve: $(STAMP) ## Run Triton and the OpenAI-compatible proxy with the shipped dsv4-nano model (ARGS adds flags)
	$(BIN)/dsv4 serve $(ARGS)

test: test-unit test-server ## Run all tests, with the real tritonserver

# One BLAS thread per test process: the processes are as many as the cores.
test-unit: $(STAMP) ## Run the tests that need no server
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/unit -n auto $(ARGS)

test-server: $(STAMP) ## Run the tests against the real tritonserver
	$(BIN)/python -m pytest tests/integration tests/e2e $(ARGS)

lint: $(STAMP) ## Check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP) ## Format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP) ## Run the benchmarks
	for benchmark in benchmarks/*.py; do $(BIN)/python $$benchmark || exit 1; done

clean: ## Remove the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .schemathesis build dist
