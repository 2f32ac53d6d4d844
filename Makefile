# Each target makes .venv and installs what it needs; nothing has to be done before. `make help` lists them.
# Options of pip (another index, no cache, ...) come from pip's own environment variables.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= $(firstword $(foreach p,python3 python3.13 python3.12 python3.11 python,$(shell \
	$(p) -c 'import sys; sys.version_info >= (3, 11) and print("$(p)")' 2>/dev/null)))

CODE := $(wildcard src tools tests benchmarks examples)
TYPED := $(wildcard src tools tests benchmarks examples)
FAST := $(wildcard tests/core tests/kvmgr tests/comm tests/control_plane tests/contracts tests/test_imports.py tests/test_public_surface.py)
# Everything but what needs another machine, another engine or a lot of time; traces are skipped where there are none.
TESTS := not gpu and not slow and not peer and not root
# As many at a time as there are cores, at most four: each holds a gigabyte. Three on two cores, since tests of servers wait.
WORKERS := -n $(if $(filter 2,$(shell nproc 2>/dev/null)),3,logical) --maxprocesses 4 --dist loadfile

.PHONY: help demo serve test test-vllm test-lmdeploy test-sglang check fast mutants format docs clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.demo ## the demo model behind the HTTP server: a conversation and ten parallel requests, then the end
	$(BIN)/python tools/demo.py

serve: $(VENV)/.demo ## serve a model over HTTP; make serve MODEL=folder-or-name, default: the demo model
	$(BIN)/sagellm serve $(MODEL)

test: $(VENV)/.test ## all tests that run on any machine
	$(BIN)/python -m pytest -m "$(TESTS)" $(WORKERS) $(ARGS)

test-vllm: ## the adapter inside a real vLLM; VLLM_PYTHON=the python of its environment, which needs pytest and hypothesis
	@test -n "$(VLLM_PYTHON)" || { echo "set VLLM_PYTHON=/path/to/python of an environment with vllm" >&2; exit 1; }
	PYTHONPATH=src:. $(VLLM_PYTHON) -m pytest -o addopts= -W default -p no:cacheprovider tests/engines/guests tests/engines/vllm $(ARGS)

test-lmdeploy: ## the adapter inside a real LMDeploy; LMDEPLOY_PYTHON=the python of its environment, with pytest and hypothesis
	@test -n "$(LMDEPLOY_PYTHON)" || { echo "set LMDEPLOY_PYTHON=/path/to/python of an environment with lmdeploy" >&2; exit 1; }
	PYTHONPATH=src:. $(LMDEPLOY_PYTHON) -m pytest -o addopts= -W default -p no:cacheprovider tests/engines/guests tests/engines/lmdeploy $(ARGS)

test-sglang: ## the adapter inside a real SGLang; SGLANG_PYTHON=the python of its environment, with pytest and hypothesis
	@test -n "$(SGLANG_PYTHON)" || { echo "set SGLANG_PYTHON=/path/to/python of an environment with sglang" >&2; exit 1; }
	PYTHONPATH=src:. $(SGLANG_PYTHON) -m pytest -o addopts= -W default -p no:cacheprovider tests/engines/guests tests/engines/sglang $(ARGS)

fast: $(VENV)/.test ## lint and the tests without tensors, in seconds
	$(BIN)/ruff check $(CODE)
	$(BIN)/python -m pytest -q -x -k "not lstm" $(FAST) $(ARGS)

check: $(VENV)/.test ## lint, format, types, import rules, sizes, words, documents
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy $(TYPED)
	$(BIN)/lint-imports --no-cache
	$(BIN)/python tools/check_sizes.py
	$(BIN)/python tools/check_words.py
	$(BIN)/python tools/check_docs.py

mutants: $(VENV)/.test ## do the tests notice when one operator of the KV books or the step is wrong? (half an hour)
	$(BIN)/python tools/mutants.py $(ARGS)

format: $(VENV)/.test ## put the code into ruff's format
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

docs: $(VENV)/.test ## write the program's own output into the documents that show it
	$(BIN)/python tools/check_docs.py --write

clean: ## remove .venv and caches
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "sageLLM needs Python 3.11 or newer; set PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# An editable install of one extra; a stamp says when it was last done.
$(VENV)/.demo: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[demo]'
	@touch $@

$(VENV)/.test: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	@touch $@ $(VENV)/.demo
