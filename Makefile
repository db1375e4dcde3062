PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
ARGS ?=
WHEELS ?=
CUDA_VENV ?= .venv-cuda
# of `make versions`: the newest torch with which fshard was tested (docs/limits.md)
TORCH ?= 2.15.0
TRIED_WITH := numpy pytest pytest-xdist psutil pyyaml hypothesis safetensors torchdata torchopt
# cases of each test
MOST ?= 2

.PHONY: train test costs lint docs bench gpu fakegpu versions newest always mutants clean

train: .venv/train
	OMP_NUM_THREADS=1 $(BIN)/python -m torch.distributed.run --standalone --nproc-per-node=2 examples/nanogpt.py $(ARGS)

test: .venv/ready
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

# what a case of each test takes, by which `make test` draws: half an hour
costs:
	FSHARD_CI=1 $(MAKE) test ARGS=--write-costs

lint: .venv/ready
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

# the second sees what Zensical does not: a page that the navigation lacks
docs: .venv/docs
	$(BIN)/zensical build --strict --clean
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir build/mkdocs

bench: .venv/ready
	$(BIN)/python benchmarks/suite.py $(ARGS)

.venv/torch: constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) torch
	touch $@

.venv/train: .venv/torch pyproject.toml
	$(INSTALL) -e ".[examples]"
	touch $@

# timm and torchvision are in a folder of their own: tests/support/timm_models.py says why
.venv/ready: .venv/torch pyproject.toml
	$(INSTALL) -e ".[bench,examples,test,lint]"
	$(INSTALL) --no-deps --upgrade --target .venv/timm timm torchvision
	touch $@

.venv/docs: .venv/torch pyproject.toml
	$(INSTALL) -e ".[docs]"
	touch $@

# with the .venv if there is one: a machine with a GPU may have torch, and no package index
gpu:
	FSHARD_WHEELS=$(WHEELS) $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) benchmarks/gpu.py $(ARGS)

fakegpu: $(CUDA_VENV)/ready
	$(CUDA_VENV)/bin/python tools/fakegpu/check.py $(ARGS)

# torch for CUDA (4.6 GB), from the package index alone: what else pip is told to look at may have the build for CPUs
$(CUDA_VENV)/ready:
	test -x $(CUDA_VENV)/bin/python || $(PYTHON) -m venv $(CUDA_VENV)
	PIP_CONFIG_FILE=/dev/null PIP_FIND_LINKS= $(CUDA_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch optree numpy pytest
	touch $@

# README's program, then the tests that a release of torch may break, with one release of torch
versions: .venv-torch-$(TORCH)/ready
	OMP_NUM_THREADS=1 .venv-torch-$(TORCH)/bin/python tools/first_use.py
	OMP_NUM_THREADS=1 FSHARD_MOST=$(MOST) .venv-torch-$(TORCH)/bin/python -m pytest -n 2 --dist worksteal $(ARGS) $$(.venv-torch-$(TORCH)/bin/python tools/torch_tests.py)

# the same with what `pip install -e .` gives a stranger: the newest torch that pip takes; one case of each test
newest:
	$(MAKE) versions TORCH=newest MOST=1

# from the package index alone, as above: torch for CUDA (5.4 GB). The newest may be another one each time
.venv-torch-$(TORCH)/ready: $(if $(filter newest,$(TORCH)),always)
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	PIP_CONFIG_FILE=/dev/null PIP_CONSTRAINT= PIP_FIND_LINKS= $(@D)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade -e . torch$(patsubst ==newest,,==$(TORCH)) $(TRIED_WITH)
	touch $@

# each of the other benchmarks: bench-optimizers is benchmarks/optimizers.py
bench-%: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/$*.py $(ARGS)

mutants: .venv/ready
	$(INSTALL) -e ".[mutants]"
	$(BIN)/python benchmarks/mutants.py $(ARGS)

clean:
	rm -rf .venv .venv-cuda .venv-torch-* tools/fakegpu/stub/build build site runs mutants .pytest_cache .mypy_cache .ruff_cache
