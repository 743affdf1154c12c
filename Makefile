# `make train` and `make test` do everything on a fresh machine, from creating .venv on.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt
STAMP := $(VENV)/.installed-train
METAWORLD := $(VENV)/.installed-metaworld
DEV := $(VENV)/.installed-dev
LIBERO := $(VENV)/.installed-libero
LEROBOT := .venv-lerobot
MANISKILL := .venv-maniskill
MJLAB := .venv-mjlab
ENVPOOL := .venv-envpool
FLOORS := .venv-floors
WHEEL := .venv-wheel
VULKAN := .vulkan
CHROMIUM := .chromium

.PHONY: help install install-dev install-metaworld install-libero install-chromium train test test-fast test-gpu test-lerobot test-maniskill test-mjlab test-envpool test-floors test-wheel check format bench clean torture parity docs

help:  ## List the targets.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

install: $(STAMP)  ## Create .venv with what training needs (1.5 GB).

# torch is installed first and alone: resolved together with the rest, a machine without a GPU may get gigabytes of CUDA packages.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(PIP) torch
	$(PIP) --editable ".[mujoco]"
	touch $(STAMP)

install-metaworld: $(METAWORLD)  ## Add Meta-World to .venv (60 MB).

# Without its requirements: it pins one version of MuJoCo, and runs on others.
$(METAWORLD): $(STAMP)
	$(PIP) --no-deps metaworld
	$(PIP) --editable ".[suites]"
	touch $(METAWORLD)

install-dev: $(DEV)  ## Add what tests, checks and the documentation need (1.1 GB).

$(DEV): $(METAWORLD)
	$(PIP) --editable ".[dev]"
	touch $(DEV)

install-libero: $(LIBERO)  ## Add LIBERO to .venv (1 GB; its scene files are separate).

# Without their requirements, which would bring transformers, torchvision and robomimic: the extra names what is used.
$(LIBERO): $(STAMP)
	$(PIP) --no-deps hf-libero robosuite bddl
	$(PIP) --editable ".[libero]"
	touch $(LIBERO)

install-chromium: $(CHROMIUM)/chromium  ## Unpack Debian's headless Chromium for the tests of reports (90 MB, no root).

$(CHROMIUM)/chromium:
	tests/install_chromium.sh $(CHROMIUM)

train: install  ## Train the default preset (walker_ppo) and show the result.
	$(BIN)/apexrl train

test: install-dev  ## Run the whole test suite.
	$(BIN)/python -m pytest -n 2 --dist worksteal --durations 30 tests

test-fast: install-dev  ## Run unit tests, golden traces and fast contract tests: a few minutes.
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow" tests

test-gpu: install-dev  ## Run the tests that need a CUDA device.
	$(BIN)/python -m pytest -m gpu tests

# LeRobot asks for other versions of NumPy and transformers than we do.
test-lerobot:  ## Test the LeRobot adapter in an environment of its own.
	$(PYTHON) -m venv $(LEROBOT)
	$(LEROBOT)/bin/pip install --quiet torch==2.13.0
	$(LEROBOT)/bin/pip install --quiet --requirement tests/lerobot/requirements.txt
	$(LEROBOT)/bin/pip install --quiet --no-deps lerobot==0.4.4 torchvision==0.29.2
	HF_HUB_OFFLINE=1 PYTHONPATH=src $(LEROBOT)/bin/python -m pytest -p no:cacheprovider tests/lerobot

# Simulators ask for other versions than we do, or are large. Each environment is made once.
test-maniskill: $(MANISKILL)/.installed $(VULKAN)/.unpacked  ## Test the ManiSkill adapter in an environment of its own (2 GB).
	VK_ICD_FILENAMES=$(CURDIR)/$(VULKAN)/usr/lib/chromium/vk_swiftshader_icd.json LD_LIBRARY_PATH=$(CURDIR)/$(VULKAN)/usr/lib/$(shell uname -m)-linux-gnu PYTHONPATH=src $(MANISKILL)/bin/python -m pytest -p no:cacheprovider tests/maniskill

test-mjlab: $(MJLAB)/.installed  ## Test the mjlab adapter in an environment of its own (2 GB).
	PYTHONPATH=src $(MJLAB)/bin/python -m pytest -p no:cacheprovider tests/mjlab

test-envpool: $(ENVPOOL)/.installed  ## Test the envpool adapter in an environment of its own (2 GB).
	PYTHONPATH=src $(ENVPOOL)/bin/python -m pytest -p no:cacheprovider tests/envpool

.venv-%/.installed: tests/%/requirements.txt tests/requirements-package.txt
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/pip install --quiet torch==2.13.0
	.venv-$*/bin/pip install --quiet --requirement $<
	$(if $(filter mjlab,$*),.venv-$*/bin/pip install --quiet --no-deps mjlab==1.6.0 rsl-rl-lib==5.4.2)
	touch $@

# The oldest versions that pyproject.toml allows; torch brings CUDA packages of 5 GB with it.
test-floors: $(FLOORS)/.installed  ## Run the fast unit tests with the oldest supported versions, in an environment of its own.
	PYTHONPATH=src $(FLOORS)/bin/python -m pytest -p no:cacheprovider -m "not slow" tests/unit

$(FLOORS)/.installed: pyproject.toml tests/floors.py
	$(PYTHON) -m venv --clear $(FLOORS)
	$(FLOORS)/bin/python tests/floors.py > $(FLOORS)/floors.txt
	$(FLOORS)/bin/pip install --quiet --requirement $(FLOORS)/floors.txt
	$(FLOORS)/bin/pip install --quiet --constraint constraints.txt --no-deps metaworld
	touch $@

test-wheel: $(WHEEL)/.installed  ## Build the wheel and try it outside this tree, with its base dependencies only.
	rm -rf build $(WHEEL)/dist
	$(WHEEL)/bin/pip wheel --quiet --no-deps --wheel-dir $(WHEEL)/dist .
	$(WHEEL)/bin/pip install --quiet --force-reinstall --no-deps $(WHEEL)/dist/apexrl-*.whl
	$(WHEEL)/bin/python tests/try_wheel.py

$(WHEEL)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear $(WHEEL)
	$(WHEEL)/bin/pip install --quiet --constraint constraints.txt torch
	$(WHEEL)/bin/pip install --quiet --constraint constraints.txt .
	touch $@

# ManiSkill wants a Vulkan device even where nothing is drawn. Chromium brings one that runs on the CPU.
$(VULKAN)/.unpacked:
	mkdir -p $(VULKAN)
	cd $(VULKAN) && apt-get download chromium-common libvulkan1
	cd $(VULKAN) && for package in *.deb; do dpkg-deb -x "$$package" . || exit 1; done && rm ./*.deb
	touch $@

torture: install-dev  ## Kill, fill, damage and mistreat runs for up to half an hour; ends with a table of what was lost.
	$(BIN)/python -m tests.torture.run

parity: install-dev  ## Compare small runs with those of another commit, bit for bit: make parity BASE=main~3 [CASES="lift gru"].
	$(BIN)/python -m tests.parity.run $(or $(BASE),$(error BASE is missing: make parity BASE=COMMIT)) $(CASES)

docs: install-dev  ## Build the documentation as a site that needs no network: site/index.html.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "Open site/index.html"

check: install-dev  ## Lint, format check, types, layers.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: install-dev  ## Format and fix what can be fixed.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: install-dev  ## Install the peers and compare with them on one CPU thread (the others: python benchmarks/NAME.py).
	$(PIP) --editable ".[dev,bench]"
	$(BIN)/python benchmarks/ppo_cpu.py

clean:  ## Remove the virtual environments and caches.
	rm -rf $(VENV) $(LEROBOT) $(FLOORS) $(WHEEL) $(MANISKILL) $(MJLAB) $(ENVPOOL) $(VULKAN) $(CHROMIUM) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache site
