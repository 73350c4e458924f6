# make test   the gate and all tests
# make test-faults   every fault of saves and restores, of which make test meets a sample (half an hour or more)
# make test-stacks   the examples on accelerate, transformers and TRL, which it installs first
# make demo   the whole idea on real text: train, kill, restart on more ranks, export
# make check  the gate alone: format, lint, types, import order, fast tests
# make venv   the set-up alone: .venv with everything; a second run reuses it
#
# PYTHON=python3.12 make venv   another interpreter (3.11 or later)

PYTHON ?= python3
VENV   := .venv
STAMP  := $(VENV)/.installed
IN_VENV := $(VENV)/bin/python

# Torch's plain wheel for Linux brings gigabytes of CUDA packages. On a machine without a GPU, where pip is not set
# up to find PyTorch's CPU builds, name their index: make venv TORCH_INDEX="--extra-index-url <index of CPU wheels>"
TORCH_INDEX ?=

.PHONY: venv test test-faults test-stacks demo check clean

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(IN_VENV) || $(PYTHON) -m venv $(VENV)
	$(IN_VENV) -m pip install --quiet --constraint constraints.txt $(TORCH_INDEX) torch
	$(IN_VENV) -m pip install --quiet --constraint constraints.txt --editable ".[hf,s3,test,dev]"
	touch $(STAMP)

test: venv
	$(IN_VENV) tools/check.py --skip fast-tests
	$(IN_VENV) -m pytest

test-faults: venv
	FAULTS=all $(IN_VENV) -m pytest --timeout 7200 -s tests/checkpoint/training/test_fault_matrix.py

test-stacks: venv
	$(IN_VENV) -m pip install --quiet --constraint constraints.txt --editable ".[accelerate,trainer,trl]"
	$(IN_VENV) -m pytest tests/stacks

demo: venv
	$(IN_VENV) -m tools.demo

check: venv
	$(IN_VENV) tools/check.py

clean:
	rm -rf $(VENV) demo_output build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
