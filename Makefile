PYTHON ?= python3
BIN := .venv/bin

.PHONY: test test-oldest lint docs demo demo-pretrained clean

# Everything is installed in .venv, with the versions of constraints.txt.
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

test: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist loadfile

# The oldest transformers that pyproject.toml admits, on a short list of families: surgery reads whatever is installed.
.venv-oldest/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/pip install --quiet --constraint constraints.txt torch
	.venv-oldest/bin/pip install --quiet transformers==5.0.0 --editable . pytest pytest-xdist
	touch $@

test-oldest: .venv-oldest/installed
	OMP_NUM_THREADS=1 .venv-oldest/bin/python -m pytest --numprocesses auto \
		tests/test_exactness.py tests/test_surgery.py tests/test_training.py

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

docs: .venv/installed
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

demo: .venv/installed
	PATH="$(abspath $(BIN)):$$PATH" recipes/demo.sh

demo-pretrained: .venv/installed
	$(BIN)/python recipes/pretrained.py --output_dir runs/pretrained

clean:
	rm -rf .venv .venv-oldest runs site
