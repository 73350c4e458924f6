# make test   the gate and all tests
# make test-torch TORCH=2.15.0   all tests on another torch, in an environment of its own (tried on Linux without a GPU: what
#                                 README says of 2.15; PyPI's wheels bring some gigabytes of CUDA packages)
# make test-faults   every fault of saves and restores, twenty killed ranks, every sample of torch's operator database, of
#                    which make test meets some, and blocks compiled by Inductor (an hour or more)
# make test-fuzz SEEDS=1000 START=0   random programs, trained as plain data parallelism trains them (60 are in make test)
# make test-stacks   the examples on training stacks, which it installs first, in an environment of its own
# make gpu    all that half an hour on a machine with GPUs can show: gpu_report/gpu.md and gpu.json
# make demo   the whole idea on real text: train, kill, restart on more ranks, export
# make docs   the site, into site/; strict: a broken link or a missing name fails
# make release-check   wheel and sdist: built, checked, installed in a clean environment, README's example run there
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

TORCH      ?= 2.15.0
TORCH_VENV := .venv-torch-$(TORCH)

# torchtitan wants older packages than the other tests' (datasets, and with it fsspec)
STACKS_VENV  := .venv-stacks
STACKS_STAMP := $(STACKS_VENV)/.installed

# Not compiled: of all that is installed the tests import a part, which Python compiles at its first import, and keeps
# also where the caller's shell says otherwise: hundreds of processes would compile the same again.
export PYTHONDONTWRITEBYTECODE :=
PIP_OPTIONS := --quiet --no-compile --constraint constraints.txt
INSTALL := $(IN_VENV) -m pip install $(PIP_OPTIONS)
INSTALL_STACKS := $(STACKS_VENV)/bin/python -m pip install $(PIP_OPTIONS)

# Two tests at a time: one alone waits much (for ranks, processes, disks), and most need one core. A file's tests
# stay in one process; files start in the order of tests/conftest.py, the longest first.
TOGETHER := --numprocesses 2 --dist loadfile --no-loadscope-reorder --durations 25

.PHONY: venv test test-torch test-faults test-fuzz test-stacks gpu demo docs release-check check clean

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(IN_VENV) || $(PYTHON) -m venv $(VENV)
	$(INSTALL) $(TORCH_INDEX) torch
	$(INSTALL) --editable ".[hf,s3,test,dev]"
	touch $(STAMP)

test: venv
	$(IN_VENV) tools/check.py --skip fast-tests --skip layering  # both are among all tests
	$(IN_VENV) -m pytest $(TOGETHER)

# Torch first and by version: what is installed behind it finds it there and leaves it.
test-torch:
	test -x $(TORCH_VENV)/bin/python || $(PYTHON) -m venv $(TORCH_VENV)
	$(TORCH_VENV)/bin/python -m pip install --quiet $(TORCH_INDEX) "torch==$(TORCH)"
	$(TORCH_VENV)/bin/python -m pip install --quiet --editable ".[hf,s3,test,dev]"
	$(TORCH_VENV)/bin/python -m pytest $(TOGETHER) -p tools.docs.compatibility --compatibility torch

SEEDS ?= 1000
START ?= 0
test-fuzz: venv
	SEEDS=$(SEEDS) START=$(START) $(IN_VENV) -m pytest --numprocesses 2 -k random_program tests/runtime/fuzz/test_fuzz.py

test-faults: venv
	FAULTS=all OP_DB=all COMPILE=inductor $(IN_VENV) -m pytest --timeout 7200 -s tests/checkpoint/training/test_fault_matrix.py \
	    tests/checkpoint/elastic/test_kills.py tests/dtensor/test_op_db.py tests/runtime/test_compile.py

# fsspec and what goes with it are named, since datasets, which torchtitan bounds, wants an older one than the latest s3fs
# does, and pip does not find the pair by itself. Automodel without what it needs besides: it pins another transformers,
# and kernels for GPUs. Its parallelizers, which are what is tried, need neither.
$(STACKS_STAMP): pyproject.toml constraints.txt Makefile
	test -x $(STACKS_VENV)/bin/python || $(PYTHON) -m venv $(STACKS_VENV)
	$(INSTALL_STACKS) $(TORCH_INDEX) torch
	$(INSTALL_STACKS) --editable ".[test,trl,lightning,torch-checkpointing,torchtitan,torchdata]" \
	    fsspec==2026.2.0 s3fs==2026.2.0 gcsfs==2026.2.0 adlfs==2026.8.0 gcp-storage-emulator==2026.7.19
	$(INSTALL_STACKS) --no-deps nemo_automodel==0.7.0
	$(INSTALL_STACKS) bitsandbytes==0.50.2 compressed-tensors==0.20.0 jax==0.10.2 orbax-checkpoint==0.12.8
	$(INSTALL_STACKS) setuptools wheel einops hjson msgpack ninja py-cpuinfo
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(INSTALL_STACKS) --no-deps --no-build-isolation deepspeed==0.19.8
	$(INSTALL_STACKS) --no-deps megatron-core==0.16.1
	! command -v npm > /dev/null || npm install --silent --prefix $(STACKS_VENV)/node azurite@3.37.0
	touch $(STACKS_STAMP)

test-stacks: $(STACKS_STAMP)
	$(STACKS_VENV)/bin/python -m pytest tests/stacks -p tools.docs.compatibility --compatibility stacks

gpu: venv
	$(IN_VENV) tools/gpu_run.py --minutes 25 --out gpu_report

demo: venv
	$(IN_VENV) -m tools.demo

# Versions are pinned: a site that was strict yesterday is strict today. The theme's advertisement is no warning.
docs: venv
	$(INSTALL) --editable ".[docs]"
	$(IN_VENV) tools/docs/notebook.py --check
	$(IN_VENV) -m pytest -q -s tests/house/docs/test_pages.py -k "public_name or cause_and_cure or not_run"
	NO_MKDOCS_2_WARNING=1 $(IN_VENV) -m mkdocs build --strict

release-check: venv
	$(IN_VENV) tools/release_check.py

check: venv
	$(IN_VENV) tools/check.py

clean:
	rm -rf $(VENV) .venv-torch-* $(STACKS_VENV) demo_output gpu_report site build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
