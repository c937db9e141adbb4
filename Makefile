# Turnstream: every task of the project. `make` alone lists them.
# All of them set up what they need first; a machine with Python 3.11 or newer and make is enough.

PYTHON ?= python3
# torch alone is not in constraints.txt. The index has builds without CUDA; another one, such as
# https://download.pytorch.org/whl/cu130, has them with CUDA. TORCH may also be a wheel.
TORCH ?= torch==2.13.0
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# The releases of all other packages; empty: the newest ones.
CONSTRAINTS ?= constraints.txt
# `make demo JSON=FILE` and `make chaos JSON=FILE` also write their summary there.
JSON ?=
# Of `make chaos`: how long, and which faults; a seed that failed fails again. The seed also draws fsync or everysec
# unless DURABILITY= names one.
SECONDS ?= 1800
SEED ?=
DURABILITY ?=
# Of `make simulate`: how many runs, from which seed on; with PROCESSES= on fewer than all cores.
SEEDS ?= 2000
FIRST ?= 0
# Of `make fuzz`: the number of damaged requests; SEED= repeats one campaign.
CASES ?= 2000
# Of `make mutate`: a file or folder of clients/python/src/turnstream, in batching or worker.
FILE ?= batching/scoring/tag_statistics.py

VENV := .venv
BIN := $(VENV)/bin
# What the programs need, and what all other targets need in addition.
DEMO_STAMP := $(VENV)/.demo-stamp
STAMP := $(VENV)/.setup-stamp
NEWEST := $(MAKE) VENV=.venv-newest CONSTRAINTS=
# Older releases of the tinker SDK that tests drive; the newest one is in the environment.
SDKS := 0.25.0 0.22.7 0.16.1
PROTO_VENV := .venv-proto
PROTO_STAMP := $(PROTO_VENV)/.setup-stamp
MUTMUT := $(CURDIR)/.venv-mutate/bin/mutmut
MUTMUT_STAMP := .venv-mutate/.setup-stamp
PYPROJECTS := pyproject.toml clients/python/pyproject.toml

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup constraints demo test newest campaign check bench figures mutate simulate chaos fuzz proto

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-11s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup: $(STAMP) ## make the virtual environment .venv (every other target does it too)

constraints: ## write the newest release of each package into constraints.txt
	rm -rf .venv-newest
	$(NEWEST) setup
	.venv-newest/bin/python tools/constraints.py > constraints.new
	mv constraints.new constraints.txt
	rm -rf .venv-newest

demo: $(DEMO_STAMP) ## run the main job: all services as processes, live generators, a trainer; JSON=FILE
	@$(BIN)/turnstream demo $(if $(JSON),--json "$(JSON)")

# Three processes also on two cores: who tests leases and deadlines waits most of the time. One process runs the tests of
# a file, which share processes and servers; chaos and e2e have the longest files and come first. With debug ranges, a
# thread that logs a traceback parses source, and CPython 3.11 breaks a parse of pytest's at the same time.
TESTS := PYTHONNODEBUGRANGES=1 $(BIN)/pytest -q -n 3 --dist loadfile --no-loadscope-reorder

test: $(STAMP) ## all tests but those of `make campaign`: unit, contract, integration, e2e
	$(TESTS) tests

newest: ## the same tests with the newest release of each package, in .venv-newest
	rm -rf .venv-newest
	$(NEWEST) test

campaign: $(STAMP) ## hours, each night and before a release: faults, redis-server, older SDKs, 500 examples
	HYPOTHESIS_PROFILE=campaign $(TESTS) -o timeout=1800 -m "campaign or hypothesis" tests

check: $(STAMP) ## the quick loop: lint, types, layers, unit and contract tests
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/pytest -q tests/unit tests/contract

bench: $(STAMP) ## measure the path, the core and the services; fail if a ratio to a baseline is 15 % worse
	$(BIN)/python benchmarks/pipeline.py --json benchmarks/results/pipeline.json
	$(BIN)/python benchmarks/latency.py --json benchmarks/results/latency.json
	$(BIN)/python benchmarks/peers.py --json benchmarks/results/peers.json
	$(BIN)/python benchmarks/cold.py --json benchmarks/results/cold.json
	$(BIN)/python benchmarks/ingest.py --json benchmarks/results/ingest.json
	$(BIN)/python benchmarks/batching.py --json benchmarks/results/batching.json
	$(BIN)/python benchmarks/durability.py --json benchmarks/results/durability.json
	$(BIN)/python benchmarks/stall.py --json benchmarks/results/stall.json
	$(BIN)/python benchmarks/idle.py --json benchmarks/results/idle.json
	$(BIN)/python benchmarks/release.py --json benchmarks/results/release.json
	$(BIN)/python benchmarks/failover.py --json benchmarks/results/failover.json
	$(BIN)/python benchmarks/shares.py --json benchmarks/results/shares.json
	$(BIN)/python benchmarks/training.py --json benchmarks/results/training.json
	$(BIN)/python benchmarks/sampling.py --json benchmarks/results/sampling.json
	$(BIN)/python benchmarks/tinker_api.py --json benchmarks/results/tinker_api.json
	$(BIN)/python benchmarks/gate.py

figures: $(STAMP) ## keep what `make bench` measured, in docs/benchmarks.json and its page
	$(BIN)/python benchmarks/page.py

# mutmut finds the tests of a function by its module, so that the copy has the package in src/. The copy is the only
# `turnstream` that its Python can import.
mutate: $(STAMP) $(MUTMUT_STAMP) ## change the code of FILE= in many ways, list what no unit test notices: FILE=batching/scoring
	rm -rf .mutate && mkdir .mutate && cp -r clients/python/src tests .mutate
	sed 's|{file}|$(FILE)|; s|{package}|$(firstword $(subst /, ,$(FILE)))|' pyproject.toml > .mutate/pyproject.toml
	packages=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); cd .mutate && \
	  export PYTHONPATH=$$packages:$(CURDIR)/services HYPOTHESIS_PROFILE=any OMP_NUM_THREADS=1 && \
	  $(MUTMUT) run && for name in $$($(MUTMUT) results | sed -n 's/: survived//p'); do \
	    echo "$$name"; $(MUTMUT) show $$name | grep '^[-+] '; done && \
	  $(MUTMUT) export-cicd-stats && grep -E '"(killed|survived|total|no_tests|timeout)"' mutants/mutmut-cicd-stats.json

simulate: $(STAMP) ## simulated runs from seeds, on the real scripts in memory; SEEDS=2000 FIRST=0, or SEED=; PROCESSES=
	PYTHONPATH=tests/simulation $(BIN)/python -m simulator --seeds $(SEEDS) --first $(FIRST) \
	  $(if $(SEED),--seed $(SEED)) $(if $(PROCESSES),--processes $(PROCESSES))

chaos: $(STAMP) ## random faults over a running stack; SECONDS=1800 SEED= DURABILITY= JSON=FILE
	PYTHONPATH=tests:tests/chaos $(BIN)/python -m harness.soak --seconds $(SECONDS) \
	  $(if $(SEED),--seed $(SEED)) $(if $(DURABILITY),--durability $(DURABILITY)) $(if $(JSON),--json "$(JSON)")

fuzz: $(STAMP) ## damage requests, bodies and keys at random over batcher and gateway; CASES=2000 SEED=
	PYTHONPATH=tests:tests/chaos $(BIN)/python -m fuzz --cases $(CASES) $(if $(SEED),--seed $(SEED))

proto: $(PROTO_STAMP) ## compile proto/ with the pinned compiler
	$(PROTO_VENV)/bin/python tools/generate_wire.py

PIP := $(BIN)/python -m pip install -q
# `make demo` ends with the command that plots.
PACKAGES := -e ./clients/python -e ".[trainer,plot]"
PINS := $(if $(CONSTRAINTS),-c $(CONSTRAINTS) --build-constraint $(CONSTRAINTS))

# torch goes first and alone, so that no range of another package picks its build. Where its index does not answer, it
# comes from the index of the other packages. pip is brought up to date for --group and --build-constraint.
$(DEMO_STAMP): $(PYPROJECTS) $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Turnstream needs Python 3.11 or newer: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 1; }
	@echo "setting up $(VENV) (only after a change of a pyproject.toml or of constraints.txt)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip $(if $(CONSTRAINTS),-c $(CONSTRAINTS))
	$(PIP) --no-deps $(if $(TORCH_INDEX),--retries 2 --extra-index-url "$(TORCH_INDEX)") "$(TORCH)"
	$(PIP) $(PINS) $(PACKAGES)
	@touch $@

$(STAMP): $(DEMO_STAMP)
	$(PIP) $(PINS) $(PACKAGES) --group dev
	for release in $(SDKS); do rm -rf .sdk/$$release && \
	  $(PIP) --no-deps --target .sdk/$$release "tinker==$$release" || exit 1; done
	@touch $@

$(MUTMUT_STAMP): Makefile
	$(PYTHON) -m venv .venv-mutate
	.venv-mutate/bin/python -m pip install -q "mutmut==3.8.1"
	@touch $@

# The compiler still imports pkg_resources, which setuptools 80 began to drop.
$(PROTO_STAMP): Makefile
	$(PYTHON) -m venv $(PROTO_VENV)
	$(PROTO_VENV)/bin/python -m pip install -q "grpcio-tools==1.66.2" "setuptools<80"
	@touch $@
