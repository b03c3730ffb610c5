# Either command works first on a fresh clone: both install what they need into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint format bench docs clean

help: ## show this list
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | sort

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[pretrained,tensorboard,mlflow,nvflare,docs,dev]"
	touch $@

setup: $(STAMP) ## install everything into .venv

demo: $(STAMP) ## train on built-in data, print a table, write runs/demo/report.html
	$(BIN)/fedshift demo

test: $(STAMP) ## run all tests
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --dist loadgroup

lint: $(STAMP) ## ruff, formatting, mypy --strict, import direction
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/test_architecture.py

format: $(STAMP) ## let ruff fix and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP) ## benchmarks, as ratios within one run
	for file in benchmarks/[a-z]*.py; do OMP_NUM_THREADS=1 $(BIN)/python $$file || exit 1; done

docs: $(STAMP) ## build the documentation into site/
	$(BIN)/mkdocs build --strict

clean: ## remove everything that was generated
	rm -rf $(VENV) site build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
