# `make train` and `make test` do everything on a fresh machine; both start by making .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
LIBERO := $(VENV)/.installed-libero
LEROBOT := .venv-lerobot

.PHONY: help install install-libero train test test-gpu test-lerobot check format bench clean

help:  ## List the targets.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

install: $(STAMP)  ## Make .venv with the package and its tools.

# torch goes first and alone: resolved together with the rest, a machine without a GPU may get gigabytes of CUDA packages.
# Meta-World goes in without its requirements: it asks for one version of MuJoCo, and runs on others.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps metaworld
	touch $(STAMP)

install-libero: $(LIBERO)  ## Add LIBERO to .venv (1 GB; its scene files come apart).

# Without their requirements, which would bring transformers, torchvision and robomimic: the extra names what is used.
$(LIBERO): $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps hf-libero robosuite bddl
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,libero]"
	touch $(LIBERO)

train: install  ## Train the default preset (lift_ppo) and show the result.
	$(BIN)/apexrl train lift_ppo

test: install  ## Run the whole test suite.
	$(BIN)/python -m pytest -n 2 tests

test-gpu: install  ## Run the tests that need a CUDA device.
	$(BIN)/python -m pytest -m gpu tests

# LeRobot asks for other versions of NumPy and transformers than we do.
test-lerobot:  ## Test the LeRobot adapter in an environment of its own.
	$(PYTHON) -m venv $(LEROBOT)
	$(LEROBOT)/bin/pip install --quiet torch==2.13.0
	$(LEROBOT)/bin/pip install --quiet --requirement tests/lerobot/requirements.txt
	$(LEROBOT)/bin/pip install --quiet --no-deps lerobot==0.4.4 torchvision==0.29.2
	HF_HUB_OFFLINE=1 PYTHONPATH=src $(LEROBOT)/bin/python -m pytest -p no:cacheprovider tests/lerobot

check: install  ## Lint, format check, types, layers.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: install  ## Format and fix what can be fixed.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: install  ## Install the peers and compare with them on one CPU thread (apexrl bench runs the others).
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,bench]"
	$(BIN)/apexrl bench ppo_cpu

clean:  ## Remove the virtual environment and caches.
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
