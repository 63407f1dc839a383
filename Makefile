# The commands of Lifecycle Kit. Everything runs in .venv beside this file; no command needs another one first.
#   PYTHON=python3.12   chooses the interpreter; without it the one of an existing .venv stays, else python3 is taken.
PYTHON ?= $(shell test -x .venv/bin/python && echo .venv/bin/python || echo python3)
PINNED_PYTHONS ?= python3.11 python3.12

# The environment's own programs come first for whatever is started in it, JupyterLab's `!kit doctor` included.
IN_VENV := PATH="$(CURDIR)/.venv/bin:$$PATH"

# JupyterLab refuses to run as root unless told; in rented boxes and containers people are root. It still asks for its token
# and listens on loopback only.
ROOT := $(if $(filter 0,$(shell id -u)),--allow-root)

# JupyterLab saves what it opens, so it opens copies: one set for each commit. What a person wrote into an older set stays there.
COPIES := build/lab-$(shell git rev-parse --short HEAD 2>/dev/null || echo here)
# As the server's default address, so that the printed URL leads to it as well.
START := /lab/tree/$(COPIES)/notebooks/00_start.ipynb

.PHONY: help env lab notebooks test test-all test-faults mutants lint pins
help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /make \1\t/p' $(MAKEFILE_LIST) | expand -t 16

env: ## make or update .venv; instant when nothing changed
	@$(PYTHON) -c '' || { echo "$(PYTHON) does not run here. Name a Python 3.11 or newer by its path: make env PYTHON=/path/to/python3.12"; exit 1; }
	@$(PYTHON) .ci/env.py

lab: env ## JupyterLab on copies of the notebooks, in build/
	@test -d $(COPIES) || $(IN_VENV) python -m kit notebook --copy $(COPIES)
	$(IN_VENV) JUPYTER_CONFIG_PATH="$(CURDIR)/.jupyter" python -m jupyterlab --ServerApp.ip=127.0.0.1 --LabApp.default_url=$(START) $(ROOT)

notebooks: env ## runs all notebooks and renders them to build/notebooks/*.html
	@mkdir -p build/notebooks
	@set -e; for file in notebooks/*.ipynb; do \
		$(IN_VENV) KIT_RUNS="$(CURDIR)/build/runs" python -m kit notebook $$file --to build/notebooks/$$(basename $$file .ipynb).html; \
	done

test: env ## the tests, about 7 minutes on two cores
	$(IN_VENV) python -m tests.lanes -m "not slow and not browser"

test-all: test ## every test: slow faults, notebooks and the browser too
	$(IN_VENV) python -m tests.lanes -m "slow or browser"

test-faults: env ## every variant of what `make test-all` draws from: foreign code, faults, ways to spread a job
	$(IN_VENV) python -m pytest --every -m slow tests/examples tests/faults tests/labs tests/bench/test_split.py tests/test_cli.py

mutants: env ## changes the kit's code on purpose, bug by bug, and writes which are caught to docs/mutants.md
	$(IN_VENV) python -m tests.mutants.run --page docs/mutants.md

lint: env ## style, format and types
	$(IN_VENV) ruff check .
	$(IN_VENV) ruff format --check .
	$(IN_VENV) mypy

pins: ## resolve pyproject.toml anew, for Python 3.11 and 3.12, and write constraints.txt
	$(PYTHON) .ci/pins.py $(PINNED_PYTHONS)
