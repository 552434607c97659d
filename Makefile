PYTHON ?= python3
BIN := .venv/bin

.PHONY: test lint demo demo-pretrained clean

# Everything is installed in .venv, with the versions of constraints.txt.
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

test: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist loadfile

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

demo: .venv/installed
	PATH="$(abspath $(BIN)):$$PATH" recipes/demo.sh

demo-pretrained: .venv/installed
	$(BIN)/python recipes/pretrained.py --output_dir runs/pretrained

clean:
	rm -rf .venv runs
