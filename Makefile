# Two commands for newcomers: `make demo` and `make test`. The others are listed by `make help`.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
JOBS   ?= $(shell nproc)
CMAKE   = $(if $(wildcard $(BIN)/cmake),$(BIN)/cmake,cmake)

# ccache finds the same sources in another clone.
export CCACHE_BASEDIR := $(CURDIR)
export CCACHE_NOHASHDIR := 1

CPP_SOURCES := $(shell find runtime_cpp plugins CMakeLists.txt pyproject.toml -type f)

.PHONY: help demo test test-python test-cpp test-slow test-gpu sanitize fuzz lint format wheel clean

help:  ## This list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 16

demo: $(VENV)/.installed  ## Build, fetch a small real model, compile it to an engine, ask it a question
	@$(BIN)/python scripts/demo.py

test: test-cpp test-python  ## All fast tests, C++ and Python

test-python: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m "not slow and not gpu" $(PYTEST_ARGS)

test-cpp: $(VENV)/.tools
	$(call configure,build/tests,)
	$(CMAKE) --build build/tests --target aotllm_tests -j $(JOBS)
	build/tests/tests/runtime_cpp/aotllm_tests --gtest_brief=1

test-slow: $(VENV)/.installed-test  ## Tests that take minutes or download more than 100 MB
	$(BIN)/python -m pytest -m "slow and not gpu" $(PYTEST_ARGS)

test-gpu: $(VENV)/.installed-test  ## Tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu $(PYTEST_ARGS)

# ThreadSanitizer runs the parts that have threads; the kernels are single-threaded and covered by the other two.
sanitize:  ## C++ tests under AddressSanitizer + UBSan, and the threaded ones under ThreadSanitizer
	$(call configure,build/asan,-DAOTLLM_CPU_ISAS=avx2 -DAOTLLM_SANITIZE=address$(comma)undefined)
	$(CMAKE) --build build/asan --target aotllm_tests -j $(JOBS)
	build/asan/tests/runtime_cpp/aotllm_tests --gtest_brief=1
	$(call configure,build/tsan,-DAOTLLM_CPU_ISAS=avx2 -DAOTLLM_SANITIZE=thread)
	$(CMAKE) --build build/tsan --target aotllm_tests -j $(JOBS)
	build/tsan/tests/runtime_cpp/aotllm_tests --gtest_brief=1 --gtest_filter='*Manager*:*ThreadPool*:*CpuRunner*:*Lora*:Watchdog*:BackgroundThread*:*Constraint*:*Grammar*'

FUZZ_SECONDS ?= 60
fuzz: $(VENV)/.installed-test  ## Fuzz the readers of untrusted files, FUZZ_SECONDS (60) each
	$(BIN)/python tests/fuzz/fuzz_gguf.py -max_total_time=$(FUZZ_SECONDS)
	$(BIN)/python tests/fuzz/fuzz_safetensors.py -max_total_time=$(FUZZ_SECONDS)
	$(BIN)/python tests/fuzz/fuzz_lora.py -max_total_time=$(FUZZ_SECONDS)

lint: $(VENV)/.installed-test  ## ruff, mypy, clang-format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python scripts/typecheck.py
	git ls-files '*.h' '*.cc' | xargs $(BIN)/clang-format --dry-run --Werror

format: $(VENV)/.installed-test  ## Rewrite sources in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	git ls-files '*.h' '*.cc' | xargs $(BIN)/clang-format -i

wheel: $(VENV)/.tools  ## dist/aotllm-*.whl
	$(BIN)/pip wheel --quiet --no-build-isolation --no-deps -w dist .

clean:  ## Remove builds; keep .venv and downloaded models
	rm -rf build dist .cache

# --- plumbing ---------------------------------------------------------------------------------------------------------

comma := ,

$(VENV)/.tools: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "aotllm needs Python 3.10 or newer; set PYTHON=…")'
	@command -v c++ >/dev/null || { echo "aotllm needs a C++20 compiler: apt-get install g++"; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	  { echo "python3 cannot make virtual environments here: apt-get install python3-venv"; exit 2; }
	$(BIN)/pip install --quiet "scikit-build-core>=0.11" "pybind11>=2.13" "cmake>=3.22" ninja
	@touch $@

# The list of Python files, rewritten only when it changes: an editable install maps the modules it saw.
.cache/python-files: FORCE
	@mkdir -p .cache; find aotllm builder engines -name '*.py' -not -path 'aotllm/builder/*' -not -path 'aotllm/engines/*' \
	  | LC_ALL=C sort > $@.new; cmp -s $@.new $@ && rm $@.new || mv $@.new $@

$(VENV)/.installed: $(VENV)/.tools $(CPP_SOURCES) .cache/python-files
	$(BIN)/pip install --quiet --no-build-isolation -e ".[serve]"
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/pip install --quiet --no-build-isolation -e ".[test,lint]"
	@touch $@

define configure
@test -e /usr/include/gtest/gtest.h || { echo "the C++ tests need GoogleTest: apt-get install libgtest-dev"; exit 2; }
@mkdir -p build
$(CMAKE) -S . -B $(1) -DCMAKE_BUILD_TYPE=Release -DAOTLLM_PYTHON=OFF -DAOTLLM_TESTS=ON $(2) > $(1).log || { cat $(1).log; exit 1; }
endef

FORCE:
