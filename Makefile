# The doors of a contributor. `make help` lists them.
# The first of these that will do makes .venv: the user's own, else the newest. Each is tried, for
# a shim of pyenv may stand for a Python that is not there, and Debian's may lack pip. One newer
# than 3.14 is taken only where there is no other: PyTorch may have no wheel for it.
PYTHON ?= python3 python python3.14 python3.13 python3.12 python3.11
WILL_DO := import sys, venv, ensurepip; \
	sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, int(sys.argv[1])))
VENV := .venv
BIN := $(VENV)/bin
# Every package with its version and checksums, so that each machine installs the same files.
# `make LOCK= venv` takes the newest releases that pyproject.toml allows instead.
LOCK ?= requirements.lock
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

# One worker has the tests of Slurm, which wait a good deal (tests/conftest.py); the files of the
# others are shared out in order, so that those that take long do not come last.
WORKERS ?= 2
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder tests

# Sets python to the first that will do.
FIND_PYTHON = for newest in 14 99; do for python in $(PYTHON); do \
		$$python -c "$(WILL_DO)" $$newest 2>/dev/null && break 2; python=; \
	done; done; \
	[ -n "$$python" ] || { echo "jobkit needs Python 3.11 or newer with pip and venv," \
		"and none of these is: $(PYTHON); say 'make PYTHON=/path/to/python3 ...'" >&2; exit 2; }

.DEFAULT_GOAL := help
.PHONY: help venv lock demo packages test test-all lint types unit cluster bench gpu-check docs site
.PHONY: clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

venv: $(VENV)/.installed ## create .venv and install jobkit with its tools

# uv takes half of pip's time, and compares the same checksums. It does not read pip's settings:
# where packages come from a mirror that only those name, pip installs them. Its cache is for this
# once, as a home may be small; UV_CACHE_DIR names one to keep.
$(VENV)/.installed: pyproject.toml $(LOCK)
	@$(FIND_PYTHON); echo "$$python -m venv $(VENV)"; $$python -m venv $(VENV)
ifeq ($(LOCK),)
	$(PIP) --editable '.[all,export,dev,adapters,course,site]'
else
	@sed -n '/^uv==/,/[^\\]$$/p' $(LOCK) >$(VENV)/uv.lock
	$(PIP) --require-hashes --requirement $(VENV)/uv.lock
	UV_CACHE_DIR=$${UV_CACHE_DIR:-$(VENV)/uv-cache} $(BIN)/uv pip install --quiet \
		--python $(BIN)/python --require-hashes --requirement $(LOCK) || \
		$(PIP) --require-hashes --requirement $(LOCK)
	@rm -rf $(VENV)/uv-cache
	$(PIP) --no-deps --no-build-isolation --editable .
endif
	@touch $@

# UV_CONSTRAINT=FILE keeps packages below versions that some machine cannot install.
lock: $(VENV)/.installed ## renew requirements.lock: the newest releases that pyproject.toml allows
	$(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 --all-extras \
		--generate-hashes --no-annotate --custom-compile-command 'make lock' \
		--output-file requirements.lock pyproject.toml

demo: $(VENV)/.installed ## a small study on this machine: run, collect, plot
	PATH="$(CURDIR)/$(BIN):$$PATH" ./run_benchmarks.py --study demo
	PATH="$(CURDIR)/$(BIN):$$PATH" ./plot_results.sh logs/demo

packages: ## the Debian packages of the tests, as root or in CI; others are told the command
	@$(FIND_PYTHON); PYTHONPATH=src:tests $$python -m support.needs

test: ## what a commit needs: packages, lint, types, and all tests but the long ones
	@$(MAKE) --no-print-directory -j2 packages lint types
	$(PYTEST) -m "not long" --max-torch-starts 60

test-all: test ## also the long ones: every strategy, every fault, programs of others, chaos
	$(PYTEST) -m long
	$(BIN)/python tests/bench/chaos.py --runs 6 --kills 8 --every 2

lint: $(VENV)/.installed ## ruff: lint and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed ## mypy over src/
	$(BIN)/mypy

unit: $(VENV)/.installed ## the fast tests, without torch
	$(PYTEST)/unit -m "not long"

cluster: ## a real Slurm of four nodes on this machine (hpc/minicluster --help says more)
	hpc/minicluster up

bench: $(VENV)/.installed ## the benchmarks (ARGS="--only NAME": some of them)
	$(BIN)/python tests/bench/bench.py $(ARGS)

gpu-check: $(VENV)/.installed ## on GPUs: what only they can show, and one file to send back
	JOBKIT_PYTHON=$(CURDIR)/$(BIN)/python bash hpc/gpu-check.sh $(ARGS)

docs: $(VENV)/.installed ## write the tables of docs/ that come from the source
	$(BIN)/python tools/generated_docs.py

site: docs ## build README.md and docs/ as a site in build/site; a dead link is an error
	$(BIN)/mkdocs build --strict --config-file tools/site.yml

clean: ## remove .venv and the caches (logs/ stays)
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
