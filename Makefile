# Everything runs in .venv, made by `make setup` (which every target below does first, quickly once it is made).
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := check
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.setup-stamp
# One process a core, each with one thread: the tests' matrices are too small for more.
TEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n auto
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# a notice about the future of mkdocs, at every build
export NO_MKDOCS_2_WARNING := 1

.PHONY: setup browser demo check static test bench docs clean

setup: $(STAMP)

# torch first and pinned, so that no later requirement can choose another build of it. curvlinops (cross-checks in tests
# and benchmarks) comes without its dependencies: one that it never imports asks for torchvision.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) torch
	$(PIP) hatchling editables
	$(PIP) --no-build-isolation --editable '.[dev,docs]'
	$(PIP) --no-deps curvlinops-for-pytorch
	touch $@

# Only tests that open a page need a browser. Without one they are skipped, and say so.
browser:
	@if command -v chromium >/dev/null; then :; \
	elif command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
		echo "installing Debian's chromium for the browser tests"; \
		{ apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium; } \
			>/dev/null || echo "chromium could not be installed; tests that need a browser will be skipped" >&2; \
	else \
		echo "no chromium on the PATH, and no root with apt-get to install it; tests that need a browser will be skipped." >&2; \
		echo "Install chromium to run them." >&2; \
	fi

demo: setup
	$(BIN)/downweight demo

static: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

# Formatting, lint, types and the fast tests: under three minutes.
check: static
	$(TEST) -q -m "not slow"

# All that `make check` does, with every test; pytest's closing line comes last.
test: static browser
	$(BIN)/mkdocs build --strict --quiet
	$(TEST)

# Every file of benchmarks/ but common.py and peers.py answers one question, on its first line.
bench: setup
	@for file in $(filter-out benchmarks/common.py benchmarks/peers.py,$(sort $(wildcard benchmarks/*.py))); do \
		echo "== $$file"; $(BIN)/python "$$file"; \
	done

docs: setup
	$(BIN)/mkdocs build --strict

clean:
	rm -rf site downweight-demo .pytest_cache .ruff_cache .hypothesis
