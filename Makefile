# Everything that a developer or CI types. A bare clone needs Python >= 3.11 and nothing else.
#   make run            install, start the demo set, ask it once, stay until Ctrl-C
#   make run EXTRAS=gpu the same with the GPU packages and the profile one-gpu
#   make test           CPU suite      make test-full   with the slow tests
#   make check          ruff, mypy     make bench       load generator against the running set
#   make figures        measure the demo set on a quiet machine, write README's table
#   make gpu-report     measure on a GPU, write docs/measurements/gpu-*.json (eight-gpu-report: eight)
# A GPU-less machine saves much download with PIP_EXTRA_INDEX_URL set to PyTorch's index of CPU
# wheels; pip's own settings decide where packages come from, no file here names a host.

SHELL := /bin/bash
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: gpu-report eight-gpu-report run test test-full test-gpu test-peers check bench figures demo-weights lock down clean help chaos

EXTRAS ?= cpu
PROFILE ?= $(if $(filter gpu,$(EXTRAS)),one-gpu,demo)
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
  $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
ARGS ?=
JOBS ?= 2

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
export PYTHONSAFEPATH := 1
export OMP_NUM_THREADS ?= 1

run: $(VENV)/.$(EXTRAS)
	@exec $(BIN)/decant up --profile $(PROFILE) --hello $(ARGS)

test: $(VENV)/.test
	$(BIN)/python -m pytest -q -n $(JOBS) --dist loadgroup -m "not gpu and not tp4 and not slow" $(ARGS)

test-full: $(VENV)/.test
	$(BIN)/python -m pytest -q -n $(JOBS) --dist loadgroup -m "not gpu and not tp4" $(ARGS)

test-gpu: EXTRAS := gpu
test-gpu: $(VENV)/.gpu $(VENV)/.test
	$(BIN)/python -m pytest -q -m "gpu or tp4" $(ARGS)

# Other people's clients, each in an environment of its own (.peers/NAME).
test-peers: $(VENV)/.test
	@grep -v '^#' tests/peers/requirements.txt | while read -r package; do \
	  name=$$(echo "$$package" | sed 's/[^A-Za-z0-9_-].*//'); \
	  test -x .peers/$$name/bin/pip || $(PYTHON) -m venv .peers/$$name || exit 1; \
	  .peers/$$name/bin/pip install -q "$$package" || exit 1; done
	DECANT_PEERS=$(CURDIR)/.peers $(BIN)/python -m pytest -q tests/peers $(ARGS)

check: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(VENV)/.$(EXTRAS)
	$(BIN)/decant bench $(ARGS)

# On a machine with a GPU: in pieces under nine minutes each; goes on where it was cut.
gpu-report: EXTRAS := gpu
gpu-report: $(VENV)/.gpu
	$(BIN)/python -P .ci/gpu-report $(ARGS)

eight-gpu-report: EXTRAS := gpu
eight-gpu-report: $(VENV)/.gpu
	$(BIN)/python -P .ci/gpu-report eight $(ARGS)

figures: $(VENV)/.$(EXTRAS)
	$(BIN)/python -P .ci/figures measure $(ARGS)

chaos: $(VENV)/.test
	$(BIN)/python tests/chaos/run_all.py $(ARGS)

demo-weights: $(VENV)/.$(EXTRAS)
	$(BIN)/python -P -m decant.engine.demo.recipe --out build/demo $(ARGS)

down:
	$(BIN)/decant down $(ARGS)

# ---- the virtual environment: made once, renewed when a lock file or pyproject.toml changes -------

$(VENV)/.venv:
	@test -n "$(PYTHON)" || { echo "decant needs Python 3.11 or newer; none was found on PATH" >&2; exit 2; }
	@echo "making $(VENV) with $$($(PYTHON) -c 'import sys; print(sys.version.split()[0])')"
	@.ci/venv $(PYTHON) $(VENV)
	@touch $@

# $(1): stamp, $(2): lock files
define install
	@echo "installing $(2) (minutes the first time)"
	@$(PIP) install -qq $(foreach lock,$(2),-r $(lock))
	@$(PIP) install -qq --no-deps --no-build-isolation -e .
	@touch $(1)
endef

$(VENV)/.cpu: $(VENV)/.venv requirements-cpu.lock pyproject.toml
	$(call install,$@,requirements-cpu.lock)

$(VENV)/.gpu: $(VENV)/.venv requirements-gpu.lock pyproject.toml
	$(call install,$@,requirements-gpu.lock)

# NOTE: torch built for CUDA brings its own Triton, so that one is not pinned twice.
$(VENV)/.test: $(VENV)/.$(EXTRAS) requirements-test.lock
	@grep -v $(if $(filter gpu,$(EXTRAS)),'^triton==','^#') requirements-test.lock > $(VENV)/test.lock
	$(call install,$@,$(VENV)/test.lock)

lock:  ## rewrite the lock files from what is installed in .venv, after installing the new versions
	$(BIN)/python -P .ci/lock

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

help:
	@sed -n '2,10p' Makefile
