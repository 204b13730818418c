# make demo    two worker processes train on real digits; a fresh process then predicts
# make test    lint, types, documentation, tests: what CI runs before samples of the others
# make docs    the site, with guides, notebooks and API reference: build/docs/index.html
# make bench   time of a step, memory and a whole training beside other ways, each with its goal
#
# Needs Python 3.11 to 3.13 and make; the rest goes into .venv, which follows pyproject.toml.

.DEFAULT_GOAL := help
.PHONY: help demo test pytest nightly updates flaky breaks test-oldest test-nightly test-keras bench package lint type docs diagrams notebooks clean

SHELL := bash
VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed
DEV   := $(VENV)/.installed-dev
# The site alone (make docs) needs less than the tests, whose packages include it.
DOCS  := $(if $(wildcard $(DEV)),$(DEV),$(VENV)/.installed-docs)

# The first Python that TensorFlow has wheels for; `make PYTHON=/path/to/python` overrides it.
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	"$$p" -c '$(SUPPORTED)' 2>/dev/null && { echo "$$p"; break; }; done)

# TensorFlow's start-up notices would drown the progress bar; Python's errors are still shown.
QUIET := TF_CPP_MIN_LOG_LEVEL=3
WITHOUT_NOTICES := 2> >(grep -vE '^(WARNING: All log messages before absl|I0000 )' >&2)

help:
	@sed -n 's/^# make /make /p' Makefile
	@echo "make nightly, make flaky, make breaks, make test-oldest, make test-nightly, make test-keras, make lint, make type,"
	@echo "make package, make notebooks, make diagrams, make clean"

$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { \
	  echo "tfmw needs Python 3.11, 3.12 or 3.13, and none is on PATH;" \
	       "install one, or say where it is: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)"; \
	  exit 1; }
	@test -x $(BIN)/python || { echo "Creating $(VENV) with $(PYTHON)"; "$(PYTHON)" -m venv $(VENV); }
	@echo "Installing tfmw and TensorFlow into $(VENV) (a minute, once)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(DEV): $(STAMP)
	@echo "Installing what tests and documentation need into $(VENV) (some minutes, once)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --editable '.[dev,docs,engines,trackers]'
	@touch $@

$(VENV)/.installed-docs: $(STAMP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	@touch $@

demo: $(STAMP)
	@$(QUIET) $(BIN)/tfmw run --workers 2 recipes/digits.py --export_dir=build/digits
	@$(QUIET) $(BIN)/python recipes/predict.py --export_dir=build/digits $(WITHOUT_NOTICES)

# With it, each process compiles the package, and each run of pytest rewrites all tests anew.
unexport PYTHONDONTWRITEBYTECODE

# Files of tests at a time: two of them keep two cores busy.
JOBS ?= 2

PYTEST = $(BIN)/python -m pytest $(if $(filter-out 1,$(JOBS)),-n $(JOBS) --dist loadfile --no-loadscope-reorder)

# The site is built beside the first tests: it keeps one core busy for a minute and a half.
test: $(DEV)
	@$(MAKE) --no-print-directory --jobs $(JOBS) lint type
	@$(MAKE) --no-print-directory --jobs 2 docs pytest

pytest: $(DEV)
	@$(PYTEST) -m "not nightly"

# More cases of the kinds that make test has, what takes long, and the real Slurm, Spark and Ray. All of
# it takes hours, then come the other targets of tests. With TESTS (files) or PART=8 (an eighth, another
# one for each commit, or that of the SEED that a run has printed), it is only that.
NIGHTLY_NEEDS := slurmctld:slurm-wlm java:default-jre-headless node:nodejs npm:npm kubectl:kubernetes-client

AZURITE := build/azurite/node_modules/.bin/azurite-blob

$(AZURITE):
	@npm install --silent --no-audit --no-fund --prefix build/azurite azurite@3.35

nightly: $(DEV) $(AZURITE)
	@$(if $(TESTS),,$(foreach need,$(NIGHTLY_NEEDS),PATH="$$PATH:/usr/sbin" command -v $(firstword $(subst :, ,$(need))) >/dev/null || \
	  { echo "make nightly needs $(lastword $(subst :, ,$(need))): apt-get install $(lastword $(subst :, ,$(need)))"; exit 1; };))
	@$(if $(PART),TFMW_TEST_PART=$(PART)) $(if $(SEED),TFMW_TEST_SEED=$(SEED)) \
	  $(if $(PART)$(TESTS),,TFMW_TEST_HOSTS=all TFMW_TEST_SCHEDULES=5000) \
	  $(PYTEST) --timeout 1800 -m nightly $(TESTS)
	@$(if $(PART)$(TESTS),,$(MAKE) --no-print-directory --keep-going breaks updates test-oldest test-nightly test-keras)

# The matrix, backups and resuming with each way to make the update forced: shared between workers or
# not, compiled or not. An hour.
updates: $(DEV)
	@for shared in on off; do for fused in on off; do \
	  TFMW_SHARD_OPTIMIZER=$$shared TFMW_FUSED_UPDATE=$$fused $(BIN)/python -m pytest --timeout 1800 \
	    tests/matrix tests/checkpoint/test_restart_fit.py tests/checkpoint/test_resume.py || exit 1; \
	done; done

# What make test runs, twelve times: quiet, under load, on one core, and in drawn orders, three times
# each. TESTS: files or other arguments of pytest; SEED: of the orders.
flaky: $(DEV)
	@$(BIN)/python -m tests.flaky $(if $(SEED),--seed $(SEED)) \
	  $(if $(filter-out 1,$(JOBS)),-n $(JOBS) --dist loadfile --no-loadscope-reorder) -m "not nightly" $(TESTS)

# A mistake for each promise, in a copy of the tree: the tests that tests/breaks.toml names must see it.
# WORDS: of the promises to be broken; by default all are.
breaks: $(DEV)
	@$(BIN)/python -m tests.breaks $(WORDS)

# The oldest TensorFlow and Keras that tfmw works with, in an environment of their own. PART, SEED: as of
# nightly.
OLDEST := build/oldest

test-oldest: pyproject.toml
	@test -x $(OLDEST)/bin/python || "$(PYTHON)" -m venv $(OLDEST)
	@$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check \
	  'tensorflow==2.18.1' 'keras==3.8.0' hypothesis pytest pytest-timeout --editable .
	@$(if $(PART),TFMW_TEST_PART=$(PART)) $(if $(SEED),TFMW_TEST_SEED=$(SEED)) \
	  $(OLDEST)/bin/python -m pytest -m "not process" \
	  tests/keras_compat/test_keras_compat.py tests/mirrored/test_cached_driver.py tests/layers \
	  tests/matrix

# The Keras of tonight on the newest TensorFlow, in an environment of their own: what will break. Its
# package takes the place of Keras's, which TensorFlow requires.
NIGHTLY := build/nightly

test-nightly: pyproject.toml
	@test -x $(NIGHTLY)/bin/python || "$(PYTHON)" -m venv $(NIGHTLY)
	@$(NIGHTLY)/bin/python -m pip install --quiet --disable-pip-version-check \
	  grain hypothesis pillow pytest pytest-timeout --editable .
	@$(NIGHTLY)/bin/python -m pip uninstall --quiet --yes keras keras-nightly
	@$(NIGHTLY)/bin/python -m pip install --quiet --disable-pip-version-check \
	  --pre --no-deps keras-nightly
	@$(NIGHTLY)/bin/python -m pytest tests/data/test_grain.py tests/keras_compat/test_keras_distribution.py
	@$(NIGHTLY)/bin/python -m pytest -m "not process and not nightly" \
	  tests/keras_compat tests/mirrored/test_cached_driver.py tests/layers tests/matrix
	@rm -rf $(NIGHTLY)/patched && mkdir $(NIGHTLY)/patched  # the hook of docs/contribute/code.md
	@cp -r $$($(NIGHTLY)/bin/python -c 'import keras; print(keras.__path__[0])') $(NIGHTLY)/patched/keras
	@patch --quiet --strip 0 --directory $(NIGHTLY)/patched/keras < docs/contribute/keras-runtime.patch
	@for file in $(NIGHTLY)/patched/keras/src/distribution/runtime_test.py tests/upstream/runtime_hook.py; do \
	  PYTHONPATH=$(NIGHTLY)/patched $(NIGHTLY)/bin/python -m pytest $$file || exit 1; done

# Tests of others, run through tfmw, beside the same with Keras alone. SUITE: keras, hub (KerasHub) and rs
# (KerasRS), all of them or as many as SAMPLE says, drawn anew for each commit or by SEED; tf-keras (of
# tf.distribute, of legacy Keras); examples (of keras.io: their table in docs/explain/examples.md). All but
# the first are downloaded; SOURCES: a checkout instead.
SUITE ?= keras

test-keras: $(DEV)
ifeq ($(SUITE),examples)
	@$(BIN)/python -m tests.examples $(EXAMPLES) $(if $(SOURCES),--sources $(SOURCES)) $(if $(EXAMPLES),,--write)
else ifeq ($(SUITE),tf-keras)
	@$(BIN)/python -m tests.tf_keras_suite $(if $(SOURCES),--sources $(SOURCES))
else
	@$(BIN)/python -m tests.keras_suite --jobs $(JOBS) --suite $(SUITE) $(if $(SOURCES),--sources $(SOURCES)) \
	  $(if $(SAMPLE),--sample $(SAMPLE)) $(if $(SEED),--seed $(SEED))
endif

lint: $(DEV)
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet . || { echo "To format: $(BIN)/ruff format ."; exit 1; }
	@broken=$$($(BIN)/lint-imports --no-logo) || { echo "$$broken"; exit 1; }
	@$(BIN)/python docs/prose.py

type: $(DEV)
	@$(BIN)/mypy --no-error-summary

# Its peers go into an environment of their own: tf_keras, and PyTorch without CUDA's libraries where
# an index has such a build (the one of pytorch.org for CPUs, say, in PIP_INDEX_URL).
BENCH := build/bench-env

bench: pyproject.toml
	@test -x $(BENCH)/bin/python || "$(PYTHON)" -m venv $(BENCH)
	@$(BENCH)/bin/python -m pip install --quiet --disable-pip-version-check \
	  'torch==2.13.0' --editable '.[bench]'
	@$(BENCH)/bin/python -m bench

# The sdist and the wheel in dist, and whether they work: in empty environments of every supported
# Python that is found, and from the unpacked sdist.
package: $(DEV)
	@rm -rf dist
	@output=$$($(BIN)/python -m build --outdir dist . 2>&1) || { echo "$$output"; exit 1; }
	@$(BIN)/python -m tests.package

# The site. A broken link, a public name without a docstring, or a fault of the prose is an error.
docs: $(DOCS)
	@$(BIN)/codespell --skip '*.svg,*.json,*.ipynb' *.md docs tfmw recipes
	@$(QUIET) $(BIN)/python -m sphinx -c docs -E -W --keep-going --quiet . build/docs $(WITHOUT_NOTICES)
	@echo "build/docs/index.html"

# The diagrams of the pages, as SVGs in docs/diagrams. Needs npm, for mermaid, and chromium.
diagrams: $(DEV)
	@$(BIN)/python docs/diagrams.py

# Runs every notebook and keeps what it showed, in place.
notebooks: $(DEV)
	@$(BIN)/python notebooks/execute.py 2> >(grep -v IPKernelApp >&2)

clean:
	rm -rf $(VENV) build dist *.egg-info .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
