# Every target makes .venv itself, from Python 3.12 or 3.13. PYTHON=/path/to/python chooses another one.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
# Against a test that hangs, where coreutils has `timeout`; two idle cores need a sixth of it.
TEST_BUDGET := $(if $(shell command -v timeout),timeout 3600)
TEST_WORKERS := 2
MINUTES := 15
JAXTYPING := kimi_k3,beartype.beartype

.DEFAULT_GOAL := help
.PHONY: help install demo test test-slow test-aot soak bench mutations check lock clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(STAMP) ## .venv with the locked dependencies, the TPU compiler and kimi_k3 in editable form

$(STAMP): requirements/base.txt requirements/dev.txt requirements/plan.txt pyproject.toml scripts/install.sh scripts/find_python.sh
	@scripts/install.sh $(VENV)
	@touch $@

demo: $(STAMP) ## convert the tiny checkpoint, decode with it, compare with the reference
	@scripts/demo.sh

PYTEST := JAX_PLATFORMS=cpu $(TEST_BUDGET) $(BIN)/pytest -q -n $(TEST_WORKERS) --jaxtyping-packages=$(JAXTYPING)

test: $(STAMP) ## the tests, on CPU
	@$(PYTEST) -m 'not slow and not aot' $(PYTEST_ARGS)

test-slow: $(STAMP) ## the rest of the numerical proof: every form of every checkpoint
	@$(PYTEST) -m 'slow and not aot' $(PYTEST_ARGS)

test-aot: $(STAMP) ## programs of full size and every kernel, compiled for TPUs by libtpu on this machine
	@$(PYTEST) -m aot $(PYTEST_ARGS)

soak: $(STAMP) ## random schedules of rows in slots, against each row alone, for MINUTES=15
	@SOAK_MINUTES=$(MINUTES) JAX_PLATFORMS=cpu $(BIN)/pytest -q -s -n 0 --jaxtyping-packages=$(JAXTYPING) -k random_schedules \
		tests/kimi_k3/slots_test.py $(PYTEST_ARGS)

bench: $(STAMP) ## every benchmark at the size of the small model, and a page with plots, into out/bench: two minutes
	@JAX_PLATFORMS=cpu $(BIN)/python benchmarks/run_tiny.py out/bench

mutations: $(STAMP) ## every plausible misreading of the model, and the test that catches it
	@JAX_PLATFORMS=cpu $(TEST_BUDGET) $(BIN)/python scripts/mutations.py --jobs $(TEST_WORKERS) $(MUTATIONS_ARGS)

check: $(STAMP) ## lint, format and types
	@status=0; \
	$(BIN)/ruff check . || status=1; \
	$(BIN)/ruff format --check . || status=1; \
	$(BIN)/pyright || status=1; \
	exit $$status

lock: $(STAMP) ## pyproject.toml into requirements/*.txt; UPGRADE=--upgrade takes newer releases
	@scripts/lock.sh $(BIN)/uv $(UPGRADE)

clean: ## remove caches and build output; .venv stays
	rm -rf .cache .pytest_cache .ruff_cache .hypothesis build dist out maxtext_output
	find MaxText tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +
