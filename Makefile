PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv

# One thread per rank: two ranks on two cores would otherwise fight for them.
export OMP_NUM_THREADS ?= 1
# Everything here runs on models that the repository makes; nothing may be fetched.
export HF_HUB_OFFLINE ?= 1

# Two files of tests at a time, each with ranks of its own.
SIDE_BY_SIDE := --numprocesses 2 --dist loadfile

BIN := $(VENV)/bin
# The stamps' names hold what was asked for, so that another TORCH or PYTHON installs anew and the same does not.
ASKED := $(firstword $(shell echo '$(PYTHON) $(TORCH)' | cksum))
RECIPES := $(VENV)/.installed-recipes-$(ASKED)
DEV := $(VENV)/.installed-dev-$(ASKED)

.PHONY: demo test test-all check clean

demo: $(RECIPES)
	$(BIN)/python recipes/demo.py

test: $(DEV)
	$(BIN)/pytest $(SIDE_BY_SIDE) -m "not full"

test-all: $(DEV)
	$(BIN)/pytest $(SIDE_BY_SIDE)

check: $(DEV)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports

# Torch first, as its own step: which build fits the machine's accelerator is the user's choice, not a dependency's.
$(RECIPES): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[recipes]"
	rm -f $(VENV)/.installed-*
	touch $@

$(DEV): $(RECIPES)
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

clean:
	rm -rf build dist outputs *.egg-info .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
