# Every command works first on a fresh clone: it installs what it needs into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BASE := $(VENV)/.installed
FULL := $(VENV)/.installed-with-extras
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# Workers (their number: tests/conftest.py) have one thread each, or they would slow each other down.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --dist loadgroup
# pytest keeps compiled test modules for the next run, even where the environment says that Python should not.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all lint format bench docs wheel clean

help: ## show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | sort

$(BASE): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -e .
	touch $@

$(FULL): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -e ".[pretrained,tensorboard,mlflow,nvflare,dicom,export,docs,dev]"
	touch $(BASE) $@

setup: $(FULL) ## install everything into .venv

demo: $(BASE) ## train on built-in data, print a table, write runs/demo/report.html
	$(BIN)/fedshift demo

test: $(FULL) ## run the tests, without those marked slow
	$(PYTEST) -m "not slow"

test-all: $(FULL) ## run all tests
	$(PYTEST)

lint: $(FULL) ## ruff, formatting, mypy --strict, import direction
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/test_architecture.py

format: $(FULL) ## let ruff fix and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(FULL) ## benchmarks, as ratios within one run, into benchmarks/RESULTS.md: under 20 minutes
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/run_all.py

docs: $(FULL) ## build the documentation into site/
	$(BIN)/mkdocs build --strict

wheel: $(BASE) ## build the wheel, install it into a new environment, run the demo there
	rm -rf dist build/wheel-env
	$(BIN)/python -m pip wheel --quiet --no-deps -w dist .
	$(PYTHON) -m venv build/wheel-env
	build/wheel-env/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt dist/*.whl
	cd build && wheel-env/bin/fedshift doctor && wheel-env/bin/fedshift demo --out wheel-demo

clean: ## remove everything that was generated
	rm -rf $(VENV) site build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
