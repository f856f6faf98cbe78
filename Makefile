# Two commands do everything: `make train` runs the embedded job, `make test` proves the whole.
PYTHON  ?= python3
WORKERS ?= 2
VENV    := .venv
BIN     := $(VENV)/bin
INPUTS  := pyproject.toml constraints.txt scripts/setup.sh
# A test that fails is run once more; what passed only then is listed at the end as RERUN, and is a defect to look at.
PYTEST  := $(BIN)/python -m pytest --reruns 1 -rfERs --durations=15
# Jobs of several processes with deadlines, ports and namespaces of their own: one at a time.
MANY    := $(addprefix tests/,feed gpu huggingface integration launch native split strategies tuning)

.PHONY: train test lint tests bare format clean help

train: $(VENV)/.installed  ## Install, then train the embedded digit classifier: a loader process feeds a GPU side
	$(BIN)/dtrain train --split

test: lint tests bare  ## Install every backend, then check style, types, layers and all tests

lint: $(VENV)/.installed-all  ## ruff, mypy, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

tests: $(VENV)/.installed-all  ## All tests; the quick ones with a coverage floor
	$(BIN)/dtrain native build
	$(PYTEST) --cov --cov-report=xml -n $(WORKERS) --dist loadfile tests $(MANY:%=--ignore=%)
	$(PYTEST) $(MANY)

bare: $(VENV)/.installed-all  ## A fresh environment without any extra imports, trains and resumes
	scripts/check_bare_install.sh $(PYTHON)

format: $(VENV)/.installed-all  ## Format and fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(VENV)/.installed: $(INPUTS)
	scripts/setup.sh $(PYTHON) $(VENV) plots
	touch $@

$(VENV)/.installed-all: $(INPUTS) scripts/build_horovod.sh scripts/install_system_packages.sh
	scripts/install_system_packages.sh
	scripts/setup.sh $(PYTHON) $(VENV) plots,tensorboard,wandb,files,accelerate,deepspeed,horovod,mpi,feed,tunnel,hf,ray,sagemaker,dev
	touch $@ $(VENV)/.installed

clean:  ## Remove the environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis htmlcov coverage.xml .coverage*

help:  ## This list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12
