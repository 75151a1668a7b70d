# Everything is installed into .venv and into $DDTREE_PATCH_CACHE (default ~/.cache/ddtree-patch); see README.md.
.PHONY: test test-long fuzz demo smoke-test lint setup rig clean

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin

# Two files at a time, or two releases of one (see tests/conftest.py): most tests wait more than they compute.
PYTEST := $(BIN)/pytest -n 2

test: rig
	$(PYTEST) -m "not gpu and not long"

# What takes too long for every commit: the whole fault matrix, long fuzzing, many hosts.
test-long: rig
	$(PYTEST) -m "long and not gpu"

# make fuzz CASES=150000 SEED=1   generated patches, series and hosts' replies; prints how many ended how
fuzz: $(VENV)/installed
	nice $(BIN)/python -m tests.fuzz --cases $(or $(CASES),150000) --seed $(or $(SEED),1)

demo: rig
	$(BIN)/python -m scripts.demo

# make smoke-test HOST=name   the smoke suite against the server of a host of configs/hosts.toml
smoke-test: $(VENV)/installed
	@test -n "$(HOST)" || { echo "usage: make smoke-test HOST=name" >&2; exit 2; }
	$(BIN)/ddtree-patch smoke-test --host "$(HOST)"

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

setup: $(VENV)/installed

# The real SGLang releases that `make test` serves on the CPU, and their wheels, in the cache (some minutes the first time).
rig: $(VENV)/installed
	$(BIN)/python -m scripts.rig.target

$(VENV)/installed: pyproject.toml scripts/system_packages.sh
	sh scripts/system_packages.sh
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .hypothesis
