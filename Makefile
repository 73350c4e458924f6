# make test   the gate, and tests of everything: eight minutes
# make test-part PART=faults   the rows and jobs that make test leaves out, in parts of at most eight minutes, by name or
#                              number; tests/conftest.py lists them
# make test-order SEED=3   the tests of make test in another order
# make test-parts   every part, one after the other
# make test-all   make test, every part, test-fuzz, test-habits, test-device, test-lab, test-faults, test-families, test-stacks (a night)
# make test-torch TORCH=2.15.0   all tests on another version of torch, in a separate environment (used on Linux without a
#                                 GPU; PyPI's wheels install some gigabytes of CUDA packages)
# make test-lab   the tests that need network namespaces as nodes: as root, with iproute2 (ten minutes; make test runs some)
# make test-faults   every fault of saves and restores, twenty killed ranks, ranks killed and stalled at every call,
#                    every sample of torch's operator database (make test runs some), and blocks compiled by Inductor
#                    (two hours or more)
# make test-fuzz SEEDS=1000 START=0   random programs, compared with plain data parallelism (make test runs 26)
# make test-habits SEEDS=2000 START=0   what users do to parameters, at every moment, compared with plain data parallelism and
#                                       with FSDP2 (make test runs 400)
# make test-device SEED=0   programs on a device with asynchronous streams: 500 drawn ones, every switch in 12
#                           orders, and without each wait (make test runs a sample; needs a C++ compiler; half an hour)
# make test-families   every model type of transformers, small: from its files into shards and formats, and back to the
#                      same bytes; writes docs/families.md (half an hour)
# make test-stacks   the examples on training stacks, which it installs into a separate environment
# make gpu    checks and figures on a machine with a GPU, nine minutes, no installation: gpu_report/gpu.md and gpu.json
# make demo   a demonstration on real text: train, kill, restart on more ranks, export (RANKS="8 6": on others)
# make notebook   run the tutorial, and store it with its outputs in docs/start.ipynb (two minutes)
# make docs   build the site into site/; a broken link or a missing name fails
# make release-check   check versions, build and check wheel and sdist, install in a clean environment, run README there
# make check  only the gate: format, lint, types, import order, fast tests
# make venv   only the set-up: .venv with everything; a second run reuses it
#
# PYTHON=python3.12 make venv   another interpreter (3.11 or later)

PYTHON ?= python3
VENV   := .venv
STAMP  := $(VENV)/.installed
IN_VENV := $(VENV)/bin/python

# Torch's default wheel for Linux installs gigabytes of CUDA packages. On a machine without a GPU, if pip is not
# configured for PyTorch's CPU builds: make venv TORCH_INDEX="--extra-index-url <index of CPU wheels>"
TORCH_INDEX ?=

TORCH      ?= 2.15.0
TORCH_VENV := .venv-torch-$(TORCH)

# A separate environment: torchtitan requires older packages than the other tests (datasets, and so fsspec).
STACKS_VENV  := .venv-stacks
STACKS_STAMP := $(STACKS_VENV)/.installed

# pip does not compile: the tests import only a part of the installed files. Python compiles those at their first import,
# and stores the result even if the caller's shell disables that; else hundreds of processes would compile them again.
export PYTHONDONTWRITEBYTECODE :=
PIP_OPTIONS := --quiet --no-compile --constraint constraints.txt
INSTALL := $(IN_VENV) -m pip install $(PIP_OPTIONS)
INSTALL_STACKS := $(STACKS_VENV)/bin/python -m pip install $(PIP_OPTIONS)

# Two tests at a time: a test waits much of its time (for ranks, processes, disks), and most need one core. The tests of
# a file run in one process; files start in the order of tests/conftest.py, the longest first.
TOGETHER := --numprocesses 2 --dist loadfile --no-loadscope-reorder --durations 25

.PHONY: venv test test-part test-parts test-order test-all test-torch test-faults test-fuzz test-habits test-lab test-device test-families test-stacks gpu demo notebook docs release-check check clean

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(IN_VENV) || $(PYTHON) -m venv $(VENV)
	$(INSTALL) $(TORCH_INDEX) torch
	$(INSTALL) --editable ".[hf,s3,test,dev]"
	$(IN_VENV) -c "from tests.support import async_device as device; device.missing_compiler() or device.build()"
	touch $(STAMP)

test: venv
	$(IN_VENV) -m pytest $(TOGETHER) --part core

PART ?= 1
test-part: venv
	$(IN_VENV) -m pytest $(TOGETHER) --part $(PART)

test-parts:
	for part in 1 2 3 4 5; do $(MAKE) test-part PART=$$part || exit 1; done

SEED ?= 1
test-order: venv
	$(IN_VENV) -m pytest $(TOGETHER) --part core --random-order-seed $(SEED) --random-order-bucket module

# One after the other: each uses both cores.
test-all:
	$(MAKE) test
	$(MAKE) test-parts
	$(MAKE) test-fuzz
	$(MAKE) test-habits SEEDS=2000
	$(MAKE) test-device
	$(MAKE) test-lab
	$(MAKE) test-faults
	$(MAKE) test-families
	$(MAKE) test-stacks

# Torch is installed first, by version; all other constraints hold. Types are checked with the pinned torch only.
test-torch:
	test -x $(TORCH_VENV)/bin/python || $(PYTHON) -m venv $(TORCH_VENV)
	$(TORCH_VENV)/bin/python -m pip install --quiet --no-compile $(TORCH_INDEX) "torch==$(TORCH)"
	grep -v "^torch==" constraints.txt > $(TORCH_VENV)/constraints.txt
	$(TORCH_VENV)/bin/python -m pip install --quiet --no-compile --constraint $(TORCH_VENV)/constraints.txt \
	    --editable ".[hf,s3,test,dev]"
	$(TORCH_VENV)/bin/python -m pytest $(TOGETHER) --ignore tests/tools/test_check.py -p tools.docs.resumable \
	    --resumable $(TORCH_VENV)/passed_tests -p tools.docs.compatibility --compatibility torch

SEEDS ?= 1000
START ?= 0
test-fuzz: venv
	SEEDS=$(SEEDS) START=$(START) $(IN_VENV) -m pytest --numprocesses 2 -k random_program tests/vescale_fsdp/runtime/fuzz/test_fuzz.py

test-habits: venv
	SEEDS=$(SEEDS) START=$(START) $(IN_VENV) -m pytest --numprocesses 2 -k random_program tests/vescale_fsdp/runtime/fuzz/habits/test_habits.py

test-device: venv
	DEVICE=all SEED=$(SEED) $(IN_VENV) -m pytest --numprocesses 2 tests/vescale_fsdp/device

# One after the other, because their ranks use all cores.
test-lab: venv
	LAB=all $(IN_VENV) -m pytest -m lab --durations 25

test-faults: venv
	FAULTS=all OP_DB=all COMPILE=inductor $(IN_VENV) -m pytest --timeout 7200 -s tests/checkpoint/save/test_fault_matrix.py \
	    tests/vescale_fsdp/elastic/test_kills.py tests/vescale_fsdp/elastic/test_formation.py \
	    tests/vescale_fsdp/dtensor/test_op_db.py tests/vescale_fsdp/runtime/test_compile.py

test-families: venv
	FAMILIES=all $(IN_VENV) -m pytest --numprocesses 2 --dist worksteal -p tools.docs.families --families tests/conversion/formats/families

# The versions of fsspec and its relatives are fixed: datasets, whose version torchtitan limits, requires an older fsspec
# than the latest s3fs, and pip does not find a matching pair. Automodel is installed without its dependencies: it pins
# another transformers and kernels for GPUs, and the tests only run its parallelizers, which need neither. The same is true
# of ModelOpt, AutoGPTQ and AutoAWQ: tests call their functions that dequantize on the CPU.
# The packages of optimizers are, too: what they need is there, or belongs to models that the tests do not import.
$(STACKS_STAMP): pyproject.toml constraints.txt Makefile
	test -x $(STACKS_VENV)/bin/python || $(PYTHON) -m venv $(STACKS_VENV)
	$(INSTALL_STACKS) $(TORCH_INDEX) torch
	$(INSTALL_STACKS) --editable ".[test,trl,lightning,torch-checkpointing,torchtitan,torchdata,ray]" \
	    torchft==0.2.0 fsspec==2026.2.0 s3fs==2026.2.0 gcsfs==2026.2.0 adlfs==2026.8.0 gcp-storage-emulator==2026.7.19
	$(INSTALL_STACKS) --no-deps nemo_automodel==0.7.0
	$(INSTALL_STACKS) bitsandbytes==0.50.2 compressed-tensors==0.20.0 gguf==0.19.0 jax==0.10.2 orbax-checkpoint==0.12.8
	$(INSTALL_STACKS) setuptools wheel einops hjson msgpack ninja py-cpuinfo omegaconf pulp nvidia-ml-py torchprofile
	$(INSTALL_STACKS) --no-deps nvidia-modelopt==0.47.0
	BUILD_CUDA_EXT=0 $(INSTALL_STACKS) --no-deps --no-build-isolation auto_gptq==0.7.1 autoawq==0.2.9
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(INSTALL_STACKS) --no-deps --no-build-isolation deepspeed==0.19.8
	$(INSTALL_STACKS) --no-deps megatron-core==0.16.1
	$(INSTALL_STACKS) tensorboard wandb
	$(INSTALL_STACKS) cloudpickle codetiming dill orjson protobuf pyvers
	$(INSTALL_STACKS) --no-deps tensordict==0.15.3 verl==0.9.1
	$(INSTALL_STACKS) --no-deps adam-mini==1.1.1 apollo-torch==1.0.3 came-pytorch==0.1.3 galore-torch==1.0 \
	    lion-pytorch==0.2.5 muon-optimizer==0.1.0 prodigyopt==1.1.2 pytorch_optimizer==4.1.0 schedulefree==1.4.1 \
	    timm==1.0.31 torch-optimi==0.3.3
	! command -v npm > /dev/null || npm install --silent --prefix $(STACKS_VENV)/node azurite@3.37.0
	touch $(STACKS_STAMP)

test-stacks: $(STACKS_STAMP)
	$(STACKS_VENV)/bin/python -m pytest tests/stacks -p tools.docs.compatibility --compatibility stacks

# The machine's own Python, because a bare machine has torch for its GPU and nothing to install from.
gpu:
	$(PYTHON) tools/gpu_run.py --minutes 9 --out gpu_report

# In the environment that is active if it has README's packages; else in one that has these alone.
demo: export TORCH_INDEX := $(TORCH_INDEX)
demo:
	$(PYTHON) tools/demo_environment.py -m tools.demo $(if $(RANKS),--ranks $(RANKS))

notebook: venv
	$(IN_VENV) tools/docs/notebook.py --run

# Versions are pinned, so that new releases do not break the strict build. The variable hides the theme's advertisement.
docs: venv
	$(INSTALL) --editable ".[docs]"
	$(IN_VENV) tools/docs/notebook.py --check
	$(IN_VENV) -m pytest -q -s tests/house/docs/test_pages.py -k "public_name or cause_and_cure or not_run"
	NO_MKDOCS_2_WARNING=1 $(IN_VENV) -m mkdocs build --strict

release-check: venv
	$(IN_VENV) -m tools.release_check

check: venv
	$(IN_VENV) tools/check.py

clean:
	rm -rf $(VENV) .venv-demo .venv-torch-* $(STACKS_VENV) demo_output gpu_report site build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
