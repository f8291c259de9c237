# Every target sets up what it needs, in .venv, on a machine with nothing but Python and make.
#
#   make test    lint, types, tests      make demo    recipes on a small GPT, and a search
#   make lint    lint and types only     make bench   times of kernels and layers
#   make fuzz    more random programs and mutations of files: PROGRAMS=1000 SEED=0 MUTATIONS=10000
#   make clean   remove everything that make has made
#   make docs    the documentation site, in site/; make docs-serve shows it and follows changes
#   make dist            wheels and sdists of crossgrain and crossgrain-te in dist/, installed and checked: some minutes
#   make test-docs       all code of the documentation, with its tutorials: some minutes
#   make test-large      kernels with more than 2**31 numbers: about 13 GB of memory, and a quarter of an hour
#   make test-report     reports in a real browser, which it installs (Debian's packages); screenshots in out/report
#   make test-clients    the same library under Megatron-core, transformers, accelerate, Lightning and torchtitan
#   make test-gpu        checks on a GPU: about ten minutes, and a report to send, out/gpu-report.json
#   make test-gpu-emulated    all that is known about GPUs without one, with two versions of Triton: some hours; RESUME=1
#                        leaves out what has passed since kernels changed, and records what passes (tests/gpu/records)

PYTHON ?= python3
WORKERS ?= 2
PROGRAMS ?= 1000
SEED ?= 0
MUTATIONS ?= 10000
# What test-gpu installs and how long it may take. For another GPU or driver: TORCH_INDEX= the address that pytorch.org shows
TORCH ?= $(shell grep '^torch==' constraints/core.txt)
TORCH_INDEX ?=
MINUTES ?= 10
# The second version of Triton of test-gpu-emulated, beside the one that belongs to torch.
NEWEST_TRITON ?= 3.9.0
# With RESUME=1 test-gpu-emulated goes on where it was interrupted.
RESUME ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Clients bring a hundred packages along, which the tests of the library itself must do without.
CLIENTS := .venv-clients
# torch for GPUs brings gigabytes along.
GPU := .venv-gpu
TRITON := .venv-triton
# The site's tools read the sources and do not import them, so neither torch nor crossgrain is there.
DOCS := .venv-docs
# What builds the packages, and an environment that has nothing else than what they bring.
DIST := .venv-dist
FRESH := .venv-installed
# Pinned versions: a file for each environment, which names the one that it is built on.
PINS := constraints
TEST_PINS := $(PINS)/core.txt $(PINS)/test.txt

.DEFAULT_GOAL := test
.PHONY: setup test test-clients test-gpu test-gpu-emulated test-large test-report lint fuzz demo bench docs docs-serve test-docs dist clean

setup: $(STAMP)

# setuptools is installed first and used without isolation, so that the build is pinned as well.
$(STAMP): pyproject.toml $(TEST_PINS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c $(PINS)/test.txt pip setuptools
	$(BIN)/python -m pip install --quiet -c $(PINS)/test.txt --no-build-isolation -e '.[test,cli,demo,lint]'
	touch $@

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# One thread here and per worker: the matrices are small, and idle OpenMP threads only fight over the cores.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup

$(CLIENTS)/.installed: pyproject.toml $(TEST_PINS) $(PINS)/clients.txt
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet -c $(PINS)/clients.txt pip setuptools
	$(CLIENTS)/bin/python -m pip install --quiet -c $(PINS)/clients.txt --no-build-isolation -e '.[clients]'
	touch $@

test-clients: $(CLIENTS)/.installed
	OMP_NUM_THREADS=1 $(CLIENTS)/bin/python -m pytest -n $(WORKERS) --dist loadfile tests/clients tests/convert/test_hugging_face.py

# The pins of torch and Triton are those of CPUs: the torch that was asked for brings the Triton that belongs to it.
$(GPU)/.installed: pyproject.toml $(TEST_PINS)
	$(PYTHON) -m venv $(GPU)
	$(GPU)/bin/python -m pip install --quiet -c $(PINS)/core.txt pip setuptools
	$(GPU)/bin/python -m pip install $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) '$(TORCH)'
	grep -h -v -e '^-c ' -e '^torch==' -e '^triton==' $(TEST_PINS) > $(GPU)/constraints.txt
	$(GPU)/bin/python -m pip install --quiet -c $(GPU)/constraints.txt --no-build-isolation -e '.[test]'
	touch $@

test-gpu: $(GPU)/.installed
	$(GPU)/bin/python -m tests.on_gpu --out out --minutes $(MINUTES)

# torch insists on its own Triton, so the other one is put in its place afterwards.
$(TRITON)/.installed: pyproject.toml $(TEST_PINS)
	$(PYTHON) -m venv $(TRITON)
	$(TRITON)/bin/python -m pip install --quiet -c $(PINS)/test.txt pip setuptools
	$(TRITON)/bin/python -m pip install --quiet -c $(PINS)/test.txt --no-build-isolation -e '.[test]'
	$(TRITON)/bin/python -m pip install --quiet --no-deps 'triton==$(NEWEST_TRITON)'
	touch $@

# Without the marks by which `make test` leaves out what takes long.
EMULATED := -m pytest -n $(WORKERS) --dist loadgroup -m '' tests/gpu tests/on_gpu $(if $(RESUME),--resume tests/gpu/records)

test-gpu-emulated: $(STAMP) $(TRITON)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python $(EMULATED)
	OMP_NUM_THREADS=1 $(TRITON)/bin/python $(EMULATED)

# The browser is that of the system. Where it is missing, Debian's packages are installed.
test-report: $(STAMP)
	@if ! command -v chromedriver || ! { command -v chromium || command -v chromium-browser || command -v google-chrome; }; then \
		command -v apt-get || { echo "install Chromium and its chromedriver, then run this again"; exit 1; }; \
		$$(test $$(id -u) = 0 || echo sudo) apt-get update && \
		$$(test $$(id -u) = 0 || echo sudo) apt-get install -y chromium chromium-driver; \
	fi
	CROSSGRAIN_SCREENSHOTS=out/report OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/lab/report -rs

# One process, because each test needs many gigabytes. One that does not fit is skipped, and says what it needs.
test-large: $(STAMP)
	$(BIN)/python -m pytest tests/large -rs

# Logs of passing steps are left out: torch's checkpoints write many.
fuzz: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --show-capture=no tests/attack/test_tensors.py \
		tests/attack/test_modules.py tests/attack/test_files.py --programs $(PROGRAMS) --seed $(SEED) \
		--mutations $(MUTATIONS)

demo: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/crossgrain compare --size tiny --out out
	OMP_NUM_THREADS=1 $(BIN)/crossgrain search --size tiny --minutes 1 --out out

bench: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks --json out/benchmarks.json --chart out/benchmarks.png

$(DOCS)/.installed: pyproject.toml $(TEST_PINS) $(PINS)/docs.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet -c $(PINS)/docs.txt pip
	$(DOCS)/bin/python -m docs.tools.packages pyproject.toml | xargs $(DOCS)/bin/python -m pip install --quiet -c $(PINS)/docs.txt
	touch $@

# What warns is an error, for the tool and for our own check of the pages that come out.
docs: $(DOCS)/.installed
	rm -rf site
	$(DOCS)/bin/zensical build --clean --strict
	$(DOCS)/bin/python -m docs.tools.check_site site

# Without the mark by which `make test` leaves out what takes long. Tutorials need the programs of others, too.
test-docs: $(CLIENTS)/.installed
	OMP_NUM_THREADS=1 $(CLIENTS)/bin/python -m pytest -n $(WORKERS) --dist loadgroup -m '' tests/docs

docs-serve: $(DOCS)/.installed
	$(DOCS)/bin/zensical serve

$(DIST)/.installed: $(TEST_PINS) $(PINS)/dist.txt
	$(PYTHON) -m venv $(DIST)
	$(DIST)/bin/python -m pip install --quiet -c $(PINS)/dist.txt pip setuptools build
	touch $@

# `build` makes the wheel from the sdist, so a file that the sdist lacks is missed here. The check runs outside of the tree.
dist: $(DIST)/.installed
	rm -rf dist $(FRESH)
	$(DIST)/bin/python -m build --no-isolation --outdir dist .
	$(DIST)/bin/python -m build --no-isolation --outdir dist crossgrain-te
	$(PYTHON) -m venv $(FRESH)
	$(FRESH)/bin/python -m pip install --quiet -c $(PINS)/dist.txt pip
	$(FRESH)/bin/python -m pip install --quiet -c $(PINS)/dist.txt mypy "$$(ls dist/crossgrain-*.whl)[cli]" dist/transformer_engine-*.whl
	$(FRESH)/bin/python -I tests/packages/check_installed.py

clean:
	rm -rf $(VENV) $(CLIENTS) $(GPU) $(TRITON) $(DOCS) $(DIST) $(FRESH) out build dist site .cache src/*.egg-info crossgrain-te/build crossgrain-te/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
