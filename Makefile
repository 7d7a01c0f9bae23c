# The commands of the project; `make help` lists them. Needs Linux, Python >= 3.10, make and g++.
# Everything is installed into .venv. Stamp files in .venv/stamps keep a repeated run to what changed.

PYTHON ?= python3
TORCH ?= torch==2.13.0
CUDA_TORCH ?= torch==2.11.0
CUDA_CACHE ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/gossamer
# One more than the cores of the figures, because ranks of tests wait for each other: 11 minutes instead of 13.
WORKERS ?= 3

# Hundreds of interpreters import the package and the tests: their bytecode is kept, whatever the environment says.
export PYTHONDONTWRITEBYTECODE :=

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.PHONY: help demo test sanitize lint bench docs build wheel release-check cuda-env cuda-build gpu-check clean

VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps
NATIVE := $(shell find csrc $(wildcard tests/cpp) -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' -o -name '*.h' \
  -o -name '*.inl')
CSRC := $(filter csrc/%,$(NATIVE))
stamp_name = $(subst =,-,$(subst /,-,$(1)))

# $(call make_venv,PYTHON,FOLDER)
define make_venv
	@$(1) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "make: $(1) must be Python 3.10 or newer; set PYTHON=..." >&2; exit 1; }
	@$(1) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "make: $(1) cannot create environments; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@test -x $(2)/bin/python || { echo "creating $(2)"; $(1) -m venv $(2); }
endef

help:
	@echo "make demo        train a small GPT with 4 workers and 8-bit gradients, and over slow links as root; 2 to 3 minutes"
	@echo "make test        the tests"
	@echo "make sanitize    the C++ tests, compiled with the sanitizers and for 64-bit ARM"
	@echo "make lint        ruff, mypy, clang-format"
	@echo "make bench       the benchmarks; one JSON line per result"
	@echo "make docs        the documentation as a site, in build/site"
	@echo "make build       only .venv and the extension"
	@echo "make wheel       wheels for each Python and torch on this machine, in dist"
	@echo "make release-check  install the wheel in an empty environment, try it, and check what would be released"
	@echo "make cuda-build  build and import the CUDA extension, and report on its kernels; needs nvcc, no GPU"
	@echo "make gpu-check   GPU tests, benchmarks and sanitizers, with this machine's own python3 and torch"
	@echo "make clean       remove what was built (.venv too)"

demo: $(STAMPS)/package
	$(BIN)/gossamer demo

test: build
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations 20 -m "not gpu and not sanitize"

sanitize: build
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup -m sanitize \
	  tests/repository/test_kernels.py tests/repository/test_platforms.py tests/repository/test_cpp.py

bench: build
	$(BIN)/python benchmarks/run_all.py

lint: build
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(NATIVE)

# MkDocs' own announcement of another program is not for readers of this build.
docs: $(STAMPS)/site
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo "built build/site; to read it, with search: $(BIN)/python -m http.server --directory build/site"

# ---- .venv and the extension in place

build: $(STAMPS)/tools $(STAMPS)/extension

$(STAMPS)/venv:
	$(call make_venv,$(PYTHON),$(VENV))
	@mkdir -p $(STAMPS) && touch $@

# Python compiles what it imports; all that is installed would take longer than to download it.
INSTALL := -m pip install --quiet --no-compile

# The stamp carries the version: another TORCH is installed, and everything after it follows.
TORCH_STAMP := $(STAMPS)/$(call stamp_name,$(TORCH))
$(TORCH_STAMP): $(STAMPS)/venv
	@rm -f $(STAMPS)/torch*
	$(BIN)/python $(INSTALL) '$(TORCH)' 'setuptools>=77' wheel ninja numpy
	@touch $@

$(STAMPS)/extension: $(TORCH_STAMP) setup.py $(CSRC)
	@echo "building the extension (minutes the first time; afterwards only what changed)"
	@$(BIN)/python setup.py --quiet build_ext --inplace
	@touch $@

# What users get, and what the demo needs. Editable, so a change to Python needs no step. Its own run of setup.py finds
# everything built.
$(STAMPS)/package: $(TORCH_STAMP) pyproject.toml | $(STAMPS)/extension
	$(BIN)/python $(INSTALL) --no-build-isolation -e '.[plots]'
	@touch $@

# What the tests and lint need besides.
$(STAMPS)/tools: $(STAMPS)/package
	$(BIN)/python $(INSTALL) --no-build-isolation -e '.[dev,plots]'
	@touch $@

# What builds the site, and what its test drives a browser with.
$(STAMPS)/site: $(STAMPS)/tools pyproject.toml
	$(BIN)/python $(INSTALL) --no-build-isolation -e '.[docs]'
	@touch $@

# ---- Wheels, with tools outside the checkout. TORCHES: folders that hold installed or unpacked versions of torch.

TORCHES ?= $(CUDA_CACHE)/torches $(CUDA_CACHE) $(VENV)
WHEEL_TOOLS := $(CUDA_CACHE)/wheel-tools
WHEEL_FLAGS ?=

$(WHEEL_TOOLS)/stamp: pyproject.toml
	@mkdir -p $(CUDA_CACHE)
	$(call make_venv,$(PYTHON),$(WHEEL_TOOLS))
	$(WHEEL_TOOLS)/bin/python $(INSTALL) 'setuptools>=77' \
	  $$($(WHEEL_TOOLS)/bin/python -c 'import pip._vendor.tomli as toml; \
	    print(*toml.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["wheels"])')
	@touch $@

wheel: $(WHEEL_TOOLS)/stamp
	PATH="$(abspath $(WHEEL_TOOLS))/bin:$$PATH" \
	  $(WHEEL_TOOLS)/bin/python cmake/wheels.py --torches $(TORCHES) $(WHEEL_FLAGS)

release-check: build wheel
	$(WHEEL_TOOLS)/bin/python cmake/release_check.py --python $(abspath $(BIN)/python) $(RELEASE_FLAGS)

# ---- CUDA without a GPU: a cached environment outside the checkout, because CUDA torch is 4.7 GB

CUDA_VENV := $(CUDA_CACHE)/cuda-venv
CUDA_TREE := $(CUDA_CACHE)/cuda-build
CUDA_STAMP := $(CUDA_VENV)/$(call stamp_name,$(CUDA_TORCH))

$(CUDA_STAMP):
	@mkdir -p $(CUDA_CACHE)
	$(call make_venv,$(PYTHON),$(CUDA_VENV))
	@rm -f $(CUDA_VENV)/torch*
	$(CUDA_VENV)/bin/python $(INSTALL) '$(CUDA_TORCH)' 'setuptools>=77' wheel ninja numpy rich
	@touch $@

# They show the machine code of kernels. Newer ones read the code of older compilers.
$(CUDA_VENV)/cuobjdump: $(CUDA_STAMP)
	$(CUDA_VENV)/bin/python $(INSTALL) nvidia-cuda-cuobjdump==13.2.78 nvidia-cuda-nvdisasm==13.2.78
	@touch $@

# What cuda-build needs that this checkout does not change: gigabytes, which CI fetches early.
cuda-env: $(CUDA_VENV)/cuobjdump

# All of them: make cuda-build CUDA_ARCHS="7.5;8.0;8.6;8.9;9.0;10.0;12.0". A warning removes the tree, so that the next run
# compiles, and warns, again. Files that are equal keep their time in the tree, so that another checkout compiles only
# what differs. A new tree begins with the Torch-free objects of this checkout, which fit every torch.
CUDA_ARCHS ?= 8.0;9.0
CUDA_SOURCES := csrc python/gossamer setup.py pyproject.toml

cuda-build: $(CUDA_VENV)/cuobjdump
	@command -v nvcc >/dev/null || \
	  { echo "make: cuda-build needs nvcc on PATH (CUDA toolkit of the major version of $(CUDA_TORCH))" >&2; exit 1; }
	@if [ -d build/core ] && [ ! -d $(CUDA_TREE)/build ]; then mkdir -p $(CUDA_TREE)/build/ptxas; \
	  cp -a csrc $(CUDA_TREE)/; cp -a build/core build/.ninja_log build/.ninja_deps $(CUDA_TREE)/build/; fi
	@mkdir -p $(CUDA_TREE)/csrc $(CUDA_TREE)/python && touch $(CUDA_TREE)/README.md
	@(cd $(CUDA_TREE) && find csrc python -type f) | while read -r file; do \
	  [ -e "$$file" ] || rm "$(CUDA_TREE)/$$file"; done
	@find $(CUDA_SOURCES) -type f ! -name '*.so' ! -name '*.pyc' | while read -r file; do \
	  cmp -s "$$file" "$(CUDA_TREE)/$$file" || install -D -m 644 "$$file" "$(CUDA_TREE)/$$file"; done
	@rm -f $(CUDA_TREE)/python/gossamer/_C*.so
	@test -d $(CUDA_TREE)/build/ptxas || rm -rf $(CUDA_TREE)/build
	@echo "building the CUDA extension for $(CUDA_ARCHS)"
	@cd $(CUDA_TREE) && mkdir -p build/ptxas && \
	  GOSSAMER_BUILD_CUDA=1 TORCH_CUDA_ARCH_LIST="$(CUDA_ARCHS)" NVCC_APPEND_FLAGS=-Xptxas=-v \
	  $(CUDA_VENV)/bin/python setup.py --quiet build_ext --inplace 2>&1 | tee -a build.log | \
	  { grep --line-buffered -vE 'ptxas info|bytes (stack frame|gmem)|^ *$$' || true; }
	@if grep -nE '(^|[ :/])warning( #| ?:)' $(CUDA_TREE)/build.log; then \
	  rm -rf $(CUDA_TREE); echo "make: cuda-build: the warnings above must go" >&2; exit 1; fi
	@$(CUDA_VENV)/bin/python cmake/kernel_report.py $(CUDA_TREE)
	@cd $(CUDA_TREE) && PYTHONPATH=python $(CUDA_VENV)/bin/python -c \
	  'import gossamer, torch; assert gossamer._C.with_cuda is True, gossamer._C.with_cuda; \
	  print("cuda-build: gossamer", gossamer.__version__, "imports with torch", torch.__version__)'

# ---- A machine with a GPU, torch and nvcc; no network, nothing installed. See docs/gpu-results.md.

COMMIT ?= $(shell git rev-parse --short HEAD 2>/dev/null)
STEPS ?=
RESULTS ?=
LIMIT_S ?=
REHEARSE ?=

gpu-check:
	@$(PYTHON) benchmarks/gpu_check.py --commit "$(COMMIT)" $(if $(STEPS),--steps "$(STEPS)") \
	  $(if $(RESULTS),--results "$(RESULTS)") $(if $(LIMIT_S),--limit-s "$(LIMIT_S)") $(if $(REHEARSE),--rehearse)

clean:
	rm -rf $(VENV) build dist python/*.egg-info python/gossamer/_C*.so demo-output \
	  .pytest_cache .mypy_cache .ruff_cache .hypothesis
