# make demo   measure two device kinds of this machine, solve, predict, train and report
# make test   lint, types and tests
# make bench  time to the proof beside plain solvers; prints a table
# make cuda   compile the CUDA sources for every architecture they are for
# Each sets up .venv first. PYTHON=python3.12 picks another interpreter.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := test
.PHONY: setup demo test lint bench cuda clean

setup: $(INSTALLED)

$(INSTALLED): pyproject.toml setup.cfg constraints.txt
	@test -x $(BIN)/pip || $(PYTHON) -m venv --clear $(VENV) || \
		{ echo "Python >= 3.10 with its venv module is needed (Debian: apt-get install python3-venv)" >&2; exit 1; }
	@echo "installing into $(VENV) ..."
	@$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --root-user-action=ignore \
		-c constraints.txt -e '.[dev]'
	@touch $@

demo: $(INSTALLED)
	@$(BIN)/qsync-opt demo

lint: $(INSTALLED)
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/mypy

# One thread of torch in each of two workers: more only get in each other's way on small tensors.
test: lint
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

bench: $(INSTALLED)
	@$(BIN)/python -m tests.benchmarks

cuda:
	@$(MAKE) -C cuda -j$$(nproc 2>/dev/null || echo 2) check

clean:
	rm -rf $(VENV) build dist demo-output report-output train-output *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
