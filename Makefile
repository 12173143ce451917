# Every target does its own set-up: .venv, torch, requirements, and the build. See `make help`.

PYTHON ?= python3
TORCH ?= torch==2.11.0
CUDA_ARCH ?= sm_90
ARGS ?=
LINK ?=
FUZZ_SECONDS ?= 60

SHELL := /bin/bash
.SHELLFLAGS := -eo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test bench build lint format cuda sanitize tsan fuzz clean

VENV := .venv
PY := $(VENV)/bin/python
CXX_FILES = $(shell find csrc tests benchmarks -name '*.h' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.cu')
BUILD_FILES = setup.py $(shell find csrc -name '*.h' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.cu')
SANITIZE := -std=c++17 -O1 -g -pthread -fsanitize=address,undefined -fno-sanitize-recover=undefined -Icsrc
BUILT := python/zipccl/_build_info.py

help:  ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## */\1\t/' | expand -t 12
	@echo 'Variables: PYTHON=$(PYTHON) TORCH=$(TORCH) ARGS= (more arguments), and setup.py'"'"'s ZIPCCL_CUDA, MAX_JOBS, ...'

demo: build  ## train a small GPT on 2 ranks, raw then zipped (LINK=1gbit: over a link of that speed, as root)
	$(PY) examples/train_gpt.py $(if $(LINK),--link $(LINK)) $(ARGS)

test: build $(VENV)/.zipccl-test  ## run the tests (ARGS="-k codec")
	$(PY) -m pytest $(ARGS)

bench: build  ## measure the codec and the collectives, some minutes (LINK=1gbit as in demo)
	$(PY) benchmarks/codec.py $(ARGS)
	$(PY) benchmarks/collectives.py $(if $(LINK),--link $(LINK)) $(ARGS)

lint: $(VENV)/.zipccl-lint  ## check format, style and layout
	$(VENV)/bin/clang-format --dry-run -Werror $(CXX_FILES)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(PY) tools/check_layout.py

format: $(VENV)/.zipccl-lint  ## rewrite the sources as lint wants them
	$(VENV)/bin/clang-format -i $(CXX_FILES)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

build: $(BUILT) $(VENV)/.zipccl-editable  ## build the extension in place and install it in .venv, editable

cuda:  ## compile the CUDA sources of the layers without torch, by nvcc alone
	mkdir -p build
	for f in $(wildcard csrc/codec/*.cu); do \
	  echo "nvcc $(CUDA_ARCH) $$f"; \
	  nvcc -c -std=c++17 -O3 -arch=$(CUDA_ARCH) -DZIPCCL_WITH_CUDA -Icsrc -o build/cuda.o $$f; \
	done

sanitize:  ## feed broken frames to the CPU decoder under AddressSanitizer and UndefinedBehaviorSanitizer
	mkdir -p build
	$(CXX) $(SANITIZE) -o build/fuzz_decode tests/fuzz/fuzz_decode.cpp csrc/codec/*.cpp
	build/fuzz_decode

tsan: build $(VENV)/.zipccl-test  ## run tests of many threads under ThreadSanitizer (builds once more for it)
	$(PY) tools/tsan.py $(ARGS)

fuzz:  ## the same, guided by coverage, for FUZZ_SECONDS (clang's libFuzzer)
	mkdir -p build
	clang++ $(SANITIZE) -fsanitize=fuzzer -DZIPCCL_LIBFUZZER -o build/fuzz_guided tests/fuzz/fuzz_decode.cpp csrc/codec/*.cpp
	build/fuzz_guided -max_total_time=$(FUZZ_SECONDS) -artifact_prefix=build/

clean:  ## remove what was built; .venv stays
	rm -rf build dist python/zipccl.egg-info python/zipccl/*.so $(BUILT) .pytest_cache .ruff_cache .hypothesis

# ---- Set-up. Stamps lie in .venv, so that removing it starts afresh. ----

$(VENV)/.zipccl-venv:
	$(PYTHON) tools/setup_env.py create
	touch $@

$(VENV)/.zipccl-torch: $(VENV)/.zipccl-venv requirements/build.txt
	$(PY) tools/setup_env.py torch $(TORCH)
	$(PY) tools/setup_env.py install requirements/build.txt ninja
	touch $@

$(VENV)/.zipccl-test: $(VENV)/.zipccl-torch requirements/test.txt
	$(PY) tools/setup_env.py install requirements/test.txt
	touch $@

$(VENV)/.zipccl-lint: $(VENV)/.zipccl-venv requirements/lint.txt
	$(PY) tools/setup_env.py install requirements/lint.txt clang-format ruff
	touch $@

# Written by setup.py after a successful build. The sed shortens commands to "[3/9] csrc/codec/frame.cpp" and "link".
$(BUILT): $(VENV)/.zipccl-torch $(BUILD_FILES)
	$(PY) -W ignore setup.py build_ext --inplace 2>&1 | \
	  sed -uE 's|^(\[[0-9]+/[0-9]+\]).* -c $(CURDIR)/([^ ]+) .*|\1 \2|; s|^[^ ]+ .*-shared .* -o ([^ ]+)|link \1|'

$(VENV)/.zipccl-editable: pyproject.toml $(VENV)/.zipccl-torch | $(BUILT)
	$(PY) -m pip install --quiet --no-build-isolation --no-deps -e .
	touch $@
