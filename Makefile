# Everything lives in .venv; nothing outside this folder is changed, except that `make test`
# installs Debian's Chromium where there is no browser and it is run by root.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

# Each example is a program of its own (three modules called `train`), so each is checked alone.
EXAMPLE_MYPY := $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml \
	--cache-dir $(CURDIR)/.mypy_cache --ignore-missing-imports --untyped-calls-exclude torch

# Without the tests of integrations, whose libraries have oldest versions of their own. The newest
# Click, which the oldest Typer gets, warns about names that Typer uses. `compile: observed` needs a
# newer torch, and FSDP2 on a CPU does.
OLDEST := $(VENV)/oldest
OLDEST_TESTS := $(addprefix tests/,annotations cli experiments export hooks keep query ranks record \
	rules spec stats store viewer ways)
OLD_OPTIONS := -W ignore::DeprecationWarning --ignore-glob='*observed*' \
	--ignore=tests/ranks/test_distributed.py

export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_COMPILE := 1
# Tests start many programs; without bytecode each would compile torch anew, for five seconds.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help demo test test-long test-oldest test-peers check lint format bench neutrality scripts docs clean browser

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*## */  make \1\t/p' $(MAKEFILE_LIST) | expand -t 18

demo: $(VENV)/.demo  ## train the tutorial with tracing and look at it (Ctrl-C ends it)
	@$(BIN)/python examples/demo.py $(ARGS)

test: lint check  ## set everything up, then lint, check types and run every test

check: $(VENV)/.test browser
	@CHROMIUM="$$(.ci/chromium)" $(BIN)/python -m pytest \
		-n auto --maxprocesses 4 --dist worksteal $(ARGS)

test-long: $(VENV)/.test browser  ## the long suites: kills, damage, folders of strangers, sessions
	@CHROMIUM="$$(.ci/chromium)" $(BIN)/python -m pytest -m slow --durations=0 $(ARGS)
	@$(BIN)/python -m pytest -p tests.support.on_gpu tests/hooks tests/awkward

test-peers: $(VENV)/.test  ## hold what the benchmarks say of other tools against their own files
	@$(BIN)/python -m benchmarks.peers
	@$(BIN)/python -m pytest tests/benchmarks/test_comgra_peer.py $(ARGS)

test-oldest: $(OLDEST)/.test browser  ## run most tests on the oldest versions of all that is needed
	@CHROMIUM="$$(.ci/chromium)" $(OLDEST)/bin/python -m pytest -n auto --maxprocesses 4 \
		--dist worksteal $(OLD_OPTIONS) $(OLDEST_TESTS) $(ARGS)

lint: $(VENV)/.test  ## ruff and mypy only
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	@echo mypy examples/demo.py; $(EXAMPLE_MYPY) examples/demo.py
	@set -e; for example in $(dir $(wildcard examples/*/train.py)); do \
		echo "mypy $$example"; (cd $$example && $(EXAMPLE_MYPY) .); done

format: $(VENV)/.test  ## let ruff format and fix what it can
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

bench: $(VENV)/.test  ## measure what tracing costs on this machine
	$(BIN)/python -m benchmarks $(ARGS)

neutrality: $(VENV)/.zoo  ## train a zoo of models with and without tracing, compare every bit
	PYTHONPATH=$(CURDIR)/$(VENV)/zoo $(BIN)/python -m benchmarks.neutrality $(ARGS)

scripts: $(VENV)/.scripts  ## run public training scripts without and with tracing, judge the records
	$(BIN)/python -m benchmarks.scripts $(ARGS)

docs: $(VENV)/.test  ## write the pages anew that come from the code and the measurements
	$(BIN)/python -m docs.compatibility
	$(BIN)/python -m docs.cost
	$(BIN)/python -m docs.reference

clean:  ## remove the environment, caches and build outputs (recorded runs stay)
	rm -rf $(VENV) build dist outputs multirun .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# -- the environment: made once, renewed when what it is made from changes -----------------------

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Python 3.11 or newer is needed; say which: make PYTHON=python3.12 ..."; exit 1; }
	@echo "Making an environment in $(VENV), once; nothing else on this machine is changed"
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(VENV)/.demo: $(BIN)/python pyproject.toml constraints.txt .ci/install.py
	$(BIN)/python .ci/install.py '.[examples]'
	@touch $@

$(VENV)/.test: $(BIN)/python pyproject.toml constraints.txt .ci/install.py
	$(BIN)/python .ci/install.py '.[dev]'
	@touch $@ $(VENV)/.demo

browser:  # while the environment is made, where make may do two things at once
	@.ci/chromium >/dev/null

# In an environment of its own, without constraints.txt.
$(OLDEST)/.test: $(BIN)/python pyproject.toml .ci/install.py
	$(PYTHON) -m venv --clear $(OLDEST)
	PIP_CONSTRAINT= $(OLDEST)/bin/python .ci/install.py --oldest '.[oldest]'
	@touch $@

# Beside the environment, not in it: torchvision's wheels are made for a torch with CUDA, and where
# torch has none, other libraries that find torchvision fail when they import it.
$(VENV)/.zoo: $(VENV)/.test
	$(BIN)/python -m pip install --quiet --no-deps --target $(VENV)/zoo --upgrade timm torchvision
	@touch $@

# Beside the environment for the same reason: Keras, Gymnasium, PyTorch Geometric and others are for
# scripts of others, and none of them is a dependency of ours.
$(VENV)/.scripts: $(VENV)/.zoo benchmarks/scripts/packages.txt
	$(BIN)/python -m pip install --quiet --no-deps --target $(VENV)/scripts --upgrade \
		-r benchmarks/scripts/packages.txt
	@touch $@
