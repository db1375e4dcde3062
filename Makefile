PYTHON ?= python3
BIN := .venv/bin
ARGS ?=
WHEELS ?=

.PHONY: train test lint bench gpu bench-footprint bench-optim bench-precision bench-simulated bench-scale bench-modules bench-check bench-checkpoints bench-init bench-delayed crashes elastic mutants clean

train: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m torch.distributed.run --standalone --nproc-per-node=2 examples/train_lm.py $(ARGS)

test: .venv/ready
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

lint: .venv/ready
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

bench: .venv/ready
	$(BIN)/python benchmarks/suite.py $(ARGS)

# timm and torchvision are in a folder of their own: tests/support/timm_models.py says why
.venv/ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[bench,examples,test,lint]"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps --upgrade --target .venv/timm timm torchvision
	touch $@

# with the .venv if there is one: a machine with a GPU may have torch, and no package index
gpu:
	FSHARD_WHEELS=$(WHEELS) $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) benchmarks/gpu.py $(ARGS)

bench-optim: .venv/ready
	$(BIN)/python benchmarks/optimizers.py $(ARGS)

bench-footprint: .venv/ready
	$(BIN)/python benchmarks/footprint.py

bench-precision: .venv/ready
	$(BIN)/python benchmarks/precision.py $(ARGS)

bench-simulated: .venv/ready
	$(BIN)/python benchmarks/simulated.py $(ARGS)

bench-scale: .venv/ready
	$(BIN)/python benchmarks/scale.py $(ARGS)

bench-modules: .venv/ready
	$(BIN)/python benchmarks/modules.py $(ARGS)

bench-check: .venv/ready
	$(BIN)/python benchmarks/checking.py $(ARGS)

bench-checkpoints: .venv/ready
	$(BIN)/python benchmarks/checkpoints.py $(ARGS)

bench-init: .venv/ready
	$(BIN)/python benchmarks/initial.py $(ARGS)

bench-delayed: .venv/ready
	$(BIN)/python benchmarks/delayed.py $(ARGS)

crashes: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/crashes.py $(ARGS)

elastic: .venv/ready
	$(BIN)/python benchmarks/elastic.py $(ARGS)

mutants: .venv/ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[mutants]"
	$(BIN)/python benchmarks/mutants.py $(ARGS)

clean:
	rm -rf .venv runs mutants .pytest_cache .mypy_cache .ruff_cache
