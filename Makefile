# make test, make demo: each sets up $(VENV) first. On a GPU machine: make test EXTRA=gpu
PYTHON ?= python3
VENV   ?= .venv
EXTRA  ?= cpu

BIN   := $(VENV)/bin
PIP   := $(BIN)/python -m pip --disable-pip-version-check -qq
STAMP := $(VENV)/.ragkv-installed-$(EXTRA)
CODE  := ragkv tests pipelines notebooks
OTHER_FAISS := $(if $(filter gpu,$(EXTRA)),faiss-cpu,faiss-gpu)

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint format bench clean

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 14

setup: $(STAMP) ## create .venv and install ragkv with the demo model and the development tools

demo: $(STAMP) ## archive a document and answer questions from it (first run converts the model: a minute)
	@$(BIN)/python pipelines/demo.py

test: lint ## lint, then the tests
	@$(BIN)/python -m pytest

lint: $(STAMP) ## ruff and mypy
	@$(BIN)/ruff check --quiet $(CODE)
	@$(BIN)/ruff format --check --quiet $(CODE) || { echo "run: make format" >&2; exit 1; }
	@$(BIN)/mypy --no-error-summary

format: $(STAMP) ## rewrite the code in its format
	@$(BIN)/ruff check --quiet --fix $(CODE)
	@$(BIN)/ruff format --quiet $(CODE)

bench: $(STAMP) ## dense attention against recall on the demo model, at 8k and 16k tokens
	@$(BIN)/ragkv bench --model demo --tokens 8192 --tokens 16384

clean: ## remove the environment and every build output (the model cache stays)
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch goes first, in an exact version: the range in pyproject.toml would otherwise take the largest build there is.
# A torch that is installed already and that the range admits is left as it is.
$(STAMP): pyproject.toml
	@case "$(EXTRA)" in cpu|gpu) ;; *) echo "EXTRA is '$(EXTRA)'; give cpu or gpu" >&2; exit 1;; esac
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "ragkv needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." \
	    "Name a newer one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import torch; v = tuple(map(int, torch.__version__.split(".")[:2])); assert (2, 13) <= v < (3,)' \
	  2>/dev/null || { echo "installing torch"; $(PIP) install torch==2.13.0; }
	@$(PIP) uninstall --yes $(OTHER_FAISS) 2>/dev/null
	@echo "installing ragkv[$(EXTRA),demo,dev]"
	@$(PIP) install --editable '.[$(EXTRA),demo,dev]'
	@rm -f $(VENV)/.ragkv-installed-* && touch $@
