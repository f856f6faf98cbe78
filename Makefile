# Two commands do everything: `make train` runs the embedded job, `make test` proves the whole.
PYTHON  ?= python3
WORKERS ?= 2
LOADERS ?= 2
VENV    := .venv
BIN     := $(VENV)/bin
INPUTS  := pyproject.toml constraints.txt scripts/setup.sh
# The set-up leaves compiling to the first import. Where Python may keep nothing of it, every process of every test would
# compile torch anew: empty means that it may.
export PYTHONDONTWRITEBYTECODE :=
# A test that fails is run once more; what passed only then is listed at the end as RERUN, and is a defect to look at.
PYTEST  := $(BIN)/python -m pytest --reruns 1 --rerun-show-tracebacks -rfERs --durations=15
# Jobs of several processes with deadlines, ports and namespaces of their own. Those that mostly wait, for a program to
# be imported, a deadline, a cluster: two files beside each other. Those that measure time or have a GPU: one at a time.
BESIDE  := $(addprefix tests/,integration strategies launch split tuning huggingface native)
ALONE   := $(addprefix tests/,feed gpu)
MANY    := $(BESIDE) $(ALONE)
# Of those folders, what is one process and waits for no other: with the quick tests.
ONE     := $(addprefix feed/test_,buffers course credit figures forecast homecoming_refused horizon packing planning sequencer turns) \
           $(addprefix huggingface/test_,loading models processing publish tiny_models trainers) \
           $(addprefix launch/test_,program report sagemaker_job sagemaker_packing sagemaker_request) \
           $(addprefix strategies/test_,dp portable precision sharding single update) \
           $(addprefix tuning/test_,best importance live records search_report space)
ONE     := $(ONE:%=tests/%.py)

.PHONY: train test lint docs tests bare format clean help docker docker-gpu docker-ddp docker-benchmark docker-token

train: $(VENV)/.installed  ## Install, then train the embedded digit classifier: a loader process feeds a GPU side
	$(BIN)/dtrain train --split

# What is no test of many processes goes beside each other, the longest first.
test: $(VENV)/.installed-all  ## Install every backend, then check style, types, layers, the site and all tests
	+$(MAKE) --no-print-directory --jobs=2 --output-sync=target bare lint docs
	+$(MAKE) --no-print-directory tests

lint: $(VENV)/.installed-all  ## ruff, mypy, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(VENV)/.installed-all  ## The documentation site in build/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

tests: $(VENV)/.installed-all  ## All tests; the quick ones with a coverage floor
	$(BIN)/dtrain native build
	$(PYTEST) --cov --cov-report=xml -n $(WORKERS) --dist loadfile --no-loadscope-reorder tests $(MANY:%=--ignore=%) $(ONE)
	$(PYTEST) -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(BESIDE) $(ONE:%=--ignore=%)
	$(PYTEST) $(ALONE) $(ONE:%=--ignore=%)

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
	scripts/setup.sh $(PYTHON) $(VENV) plots,tensorboard,wandb,files,accelerate,deepspeed,horovod,mpi,feed,tunnel,hf,ray,sagemaker,docs,dev
	touch $@ $(VENV)/.installed

docker:  ## Build both images: distributed-training:gpu trains, distributed-training:cpu loads
	docker build --target gpu --tag distributed-training:gpu .
	docker build --target cpu --tag distributed-training:cpu .

docker-gpu: docker-token  ## In containers: a GPU server, fed by CPU loaders (LOADERS=2)
	docker compose --profile split up --build --scale cpu-loader=$(LOADERS)

docker-ddp:  ## In a container: DDP on the GPUs of this machine (NPROC=2)
	docker compose run --build --rm ddp

docker-benchmark:  ## In a container: dtrain bench all; its report is copied to reports/
	docker compose run --build --name=dtrain-benchmark benchmark; code=$$?; \
	    docker cp dtrain-benchmark:/workspace/reports . ; docker rm --volumes dtrain-benchmark; exit $$code

docker-token:  # A secret that the GPU server and its loaders share, in .env, which git ignores
	@grep -qs '^FEED_TOKEN=.' .env || (umask 077 && \
	    echo "FEED_TOKEN=$$($(PYTHON) -c 'import secrets; print(secrets.token_urlsafe(24))')" >> .env)

clean:  ## Remove the environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis htmlcov coverage.xml .coverage* build/site

help:  ## This list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18
