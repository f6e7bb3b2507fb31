# Everything is installed into .venv. Nothing outside this folder changes, except that `make test`
# installs Debian's Chromium if there is no browser and it runs as root.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

# The examples are separate programs (three modules called `train`), so each is checked separately.
EXAMPLE_MYPY := $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml \
	--cache-dir $(CURDIR)/.mypy_cache --ignore-missing-imports --untyped-calls-exclude torch

# Excludes the tests of integrations, whose libraries have their own oldest versions. The oldest
# Typer is installed with the newest Click, which warns about names that Typer uses.
# `compile: observed` and FSDP2 on a CPU need a newer torch.
OLDEST := $(VENV)/oldest
OLDEST_TESTS := $(addprefix tests/,annotations cli experiments export hooks keep query ranks record \
	rules spec stats store viewer ways)
OLD_OPTIONS := -W ignore::DeprecationWarning --ignore-glob='*observed*' \
	--ignore=tests/ranks/test_distributed.py

export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_COMPILE := 1
# Tests start many programs; without bytecode, each would spend five seconds compiling torch's
# modules.
export PYTHONDONTWRITEBYTECODE :=

# Three test processes for two cores, because browser tests often wait.
WORKERS = $(shell $(PYTHON) -c 'import os; print(min(4, (os.cpu_count() or 1) * 3 // 2 or 1))')

.DEFAULT_GOAL := help
.PHONY: help demo test test-long test-oldest test-peers test-bridges test-research check lint format bench neutrality scripts docs site clean browser

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## */  make \1\t/p' $(MAKEFILE_LIST) | expand -t 20

demo: $(VENV)/.demo  ## train the tutorial with tracing and open the viewer (stop with Ctrl-C)
	@$(BIN)/python examples/demo.py $(ARGS)

test: lint check  ## set up the environment, lint, check types and run all tests

check: $(VENV)/.test browser
	@CHROMIUM="$$(.ci/chromium)" $(BIN)/python -m pytest \
		-n $(WORKERS) --dist worksteal --durations=25 --durations-min=2 $(ARGS)

test-long: $(VENV)/.test browser  ## run the long suite: further cases, many kills, damages, sessions and examples
	@CHROMIUM="$$(.ci/chromium)" $(BIN)/python -m pytest -m slow --durations=0 $(ARGS)
	@$(BIN)/python -m pytest -m hypothesis --hypothesis-profile=long
	@$(BIN)/python -m pytest -p tests.support.on_gpu tests/hooks tests/awkward

test-peers: $(VENV)/.test  ## check what the benchmarks report about other tools against those tools' files
	@$(BIN)/python -m benchmarks.peers
	@$(BIN)/python -m pytest tests/benchmarks/test_comgra_peer.py $(ARGS)

test-bridges: $(VENV)/peers/.test $(VENV)/.zoo browser  ## send runs to other tools and read them back with those tools
	@COMGRA_PEERS=1 CHROMIUM="$$(.ci/chromium)" $(VENV)/peers/bin/python -m pytest \
		tests/sinks tests/export tests/importing tests/cli/test_agents.py tests/doors/test_sweeps.py \
		tests/doors/test_adapters.py tests/pictures/test_layouts.py tests/test_extras.py \
		tests/docs/test_bridges.py tests/docs/test_samples.py tests/query/test_queries.py \
		tests/viewer/app/test_jupyterlab.py \
		-m "slow or not slow" $(ARGS)
	@PYTHONPATH=$(CURDIR)/$(VENV)/zoo $(VENV)/peers/bin/python -m pytest \
		tests/probing/test_methods.py -k resnet18 $(ARGS)
	@PYTHONPATH=$(CURDIR)/$(VENV)/zoo $(VENV)/peers/bin/python -m pytest \
		tests/doors/test_look_architectures.py -m "slow or not slow" -k timm $(ARGS)

test-research: $(VENV)/research/.test  ## compare with TransformerLens, nnsight and pyvene on the same weights
	@$(VENV)/research/bin/python -m benchmarks.transformerlens
	@$(VENV)/research/bin/python -m pytest tests/benchmarks/test_transformerlens.py \
		tests/docs/test_coming_from.py tests/probing/test_left_alone.py \
		-m "slow or not slow" $(ARGS)

test-oldest: $(OLDEST)/.test browser  ## run most tests with the oldest supported version of every dependency
	@CHROMIUM="$$(.ci/chromium)" $(OLDEST)/bin/python -m pytest -n $(WORKERS) \
		--dist worksteal $(OLD_OPTIONS) $(OLDEST_TESTS) $(ARGS)

lint: $(VENV)/.test  ## run only ruff and mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	@echo mypy examples/demo.py; $(EXAMPLE_MYPY) examples/demo.py
	@set -e; for example in $(dir $(wildcard examples/*/train.py)); do \
		echo "mypy $$example"; (cd $$example && $(EXAMPLE_MYPY) .); done

format: $(VENV)/.test  ## format the code and apply ruff's fixes
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

bench: $(VENV)/.test  ## measure the cost of tracing on this machine
	$(BIN)/python -m benchmarks $(ARGS)

neutrality: $(VENV)/.zoo  ## train a zoo of models with and without tracing and compare every bit
	PYTHONPATH=$(CURDIR)/$(VENV)/zoo $(BIN)/python -m benchmarks.neutrality $(ARGS)

scripts: $(VENV)/.scripts  ## run public training scripts with and without tracing and judge the records
	$(BIN)/python -m benchmarks.scripts $(ARGS)

docs: $(VENV)/.test  ## regenerate the pages that come from the code and the measurements
	$(BIN)/python -m docs.compatibility
	$(BIN)/python -m docs.cost
	$(BIN)/python -m docs.reference

site: $(VENV)/.test  ## build the documentation as a website that works without a network
	$(BIN)/python -m docs.site --gallery
	@echo "Open site/index.html"

clean:  ## remove the environment, caches and build outputs (recorded runs stay)
	rm -rf $(VENV) build dist site outputs multirun .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# -- the environment: created once, updated when its inputs change -------------------------------

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Python 3.11 or newer is required; choose one: make PYTHON=python3.12 ..."; exit 1; }
	@echo "Creating an environment in $(VENV), once; nothing else on this machine changes"
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(VENV)/.demo: $(BIN)/python pyproject.toml constraints.txt .ci/install.py
	$(BIN)/python .ci/install.py '.[all,examples]'
	@touch $@

$(VENV)/.test: $(BIN)/python pyproject.toml constraints.txt .ci/install.py
	$(BIN)/python .ci/install.py '.[dev]'
	@touch $@ $(VENV)/.demo

browser:  # runs while the environment is created if make may run two jobs
	@.ci/chromium >/dev/null

# A separate environment, without constraints.txt.
$(OLDEST)/.test: $(BIN)/python pyproject.toml .ci/install.py
	$(PYTHON) -m venv --clear $(OLDEST)
	PIP_CONSTRAINT= $(OLDEST)/bin/python .ci/install.py --oldest '.[oldest]'
	@touch $@

# These see the packages of the environment through a path file, and have other tools besides. In the
# environment itself, their dependencies would replace some of ours.
$(VENV)/peers/.test $(VENV)/research/.test: $(VENV)/%/.test: $(VENV)/.test
	$(PYTHON) -m venv --clear $(VENV)/$*
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> $(VENV)/$*/lib/$$(ls $(VENV)/$*/lib)/site-packages/zz-environment.pth
	$(VENV)/$*/bin/python -m pip install --quiet --editable '.[$*]'
	@touch $@

# Installed next to the environment, not in it: torchvision's wheels are built for torch with CUDA,
# and without CUDA, other libraries that find torchvision fail to import it.
$(VENV)/.zoo: $(VENV)/.test
	$(BIN)/python -m pip install --quiet --no-deps --target $(VENV)/zoo --upgrade timm torchvision
	@touch $@

# Next to the environment for the same reason: Keras, Gymnasium, PyTorch Geometric and others are
# needed by third-party scripts and are not dependencies of ours.
$(VENV)/.scripts: $(VENV)/.zoo benchmarks/scripts/packages.txt
	$(BIN)/python -m pip install --quiet --no-deps --target $(VENV)/scripts --upgrade \
		-r benchmarks/scripts/packages.txt
	@touch $@
