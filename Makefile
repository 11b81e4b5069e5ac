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

# Of target cuda: nvcc of $CUDACXX or of the machine, else PyPI's, which `.tools-cuda` fetches; one architecture.
NVCC := $(or $(CUDACXX),$(shell command -v nvcc),$(wildcard /usr/local/cuda/bin/nvcc))
PYPI_CUDA = $(firstword $(wildcard $(VENV)/lib/python3*/site-packages/nvidia/cu13))
PYPI_NVCC := nvidia-cuda-nvcc==13.0.* nvidia-cuda-crt==13.0.* nvidia-nvvm==13.0.* nvidia-cuda-runtime==13.0.* nvidia-cuda-cccl==13.0.*
CUTLASS = $(abspath $(firstword $(wildcard $(VENV)/lib/python3*/site-packages/cutlass_library)))/source/include
CUDA_ARCHS ?= 90a
CUDA_ENV = CUDACXX="$(or $(NVCC),$(abspath $(PYPI_CUDA))/bin/nvcc)"
CUDA_OPTIONS = AOTLLM_CUDA=ON AOTLLM_CUDA_ARCHS=$(CUDA_ARCHS) AOTLLM_CUTLASS_DIR=$(CUTLASS)

.PHONY: help demo test test-python test-cpp test-slow test-gpu cuda sanitize-gpu sanitize sanitize-build fuzz lint format wheel wheel-cuda clean

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

test-gpu: $(VENV)/.installed-test cuda  ## Tests that need a CUDA device
	$(CUDA_ENV) $(BIN)/pip install --quiet --no-build-isolation --no-deps $(CUDA_OPTIONS:%=-C cmake.define.%) -e .
	$(BIN)/python -m pytest -m gpu $(PYTEST_ARGS)

# What ptxas says of registers is noise unless it warns of spills.
cuda: $(VENV)/.tools-cuda  ## Compile the kernels of target cuda and their tests; those that need no GPU run
	$(call configure,build/cuda,-DAOTLLM_CPU_ISAS=avx2 $(CUDA_OPTIONS:%=-D%),$(CUDA_ENV))
	$(CMAKE) --build build/cuda --target aotllm_gpu_tests aotllm_runtime -j $(JOBS) > build/cuda-build.log 2>&1 || \
	  { grep -v '^ptxas info' build/cuda-build.log; exit 1; }
	@grep -i warning build/cuda-build.log || true
	build/cuda/tests/gpu/kernels/aotllm_gpu_tests --gtest_brief=1

# A few tests of each kind of kernel: a tool makes a test tens of times as long. racecheck reports hazards in decode attention
# whose CTAs are clusters and in experts with integer weights. Reading their barriers none was found, but whether the tool is
# wrong is open: those tests run under memcheck only.
SANITIZER := $(or $(shell command -v compute-sanitizer),$(wildcard /usr/local/cuda/bin/compute-sanitizer))
RACECHECK_GPU ?= $(subst $(space),:,$(strip RmsNorm.EveryPlanGivesTheSame Embedding.* RopeKv.PartialRotaryAndNone \
  SkinnyGemm.ResidualMayBeTheOutput LayerGemms.RowsStandAlone IntGemm.ResidualMayBeTheOutput Dequantize.* Moe.RowsStandAlone \
  *TileGemmTest.OneRow/bf16 *ContextAttention.MatchesFloat64/7 DecodeAttention.GraphWithProgrammaticLaunches \
  RowLogprobs.OfDamagedRowsAreNone Ranks/Comm.SumsAreRoundedOnceAndTheSameOnAllRanks/0))
MEMCHECK_GPU ?= $(RACECHECK_GPU):$(subst $(space),:,$(strip *TileGemmTest.OneRow/* DecodeAttention.ManyQueries \
  DecodeFused.ManyRaggedQueries Moe.RunsInGraphs Mixtures.ComputeWhatTheOpSays Sampling.DrawsFollowTheDistribution))
KERNEL_TESTS = build/cuda/tests/gpu/kernels/aotllm_gpu_tests --gtest_brief=1
sanitize-gpu: cuda  ## Some tests of kernels under compute-sanitizer (MEMCHECK_GPU and RACECHECK_GPU: which); needs a CUDA device
	@test -n "$(SANITIZER)" || { echo "compute-sanitizer is part of NVIDIA's CUDA toolkit; put it on PATH"; exit 2; }
	$(SANITIZER) --tool memcheck --error-exitcode 1 $(KERNEL_TESTS) --gtest_filter='$(MEMCHECK_GPU)'
	$(SANITIZER) --tool racecheck --error-exitcode 1 $(KERNEL_TESTS) --gtest_filter='$(RACECHECK_GPU)'

# ThreadSanitizer runs the parts that have threads; the kernels are single-threaded and covered by the other two.
sanitize: sanitize-build  ## C++ tests under AddressSanitizer + UBSan, and the threaded ones under ThreadSanitizer
	build/asan/tests/runtime_cpp/aotllm_tests --gtest_brief=1
	TSAN_OPTIONS=suppressions=$(CURDIR)/tests/runtime_cpp/tsan_suppressions.txt \
	  build/tsan/tests/runtime_cpp/aotllm_tests --gtest_brief=1 --gtest_filter='*Manager*:*ThreadPool*:*CpuRunner*:*Lora*:Watchdog*:BackgroundThread*:*Constraint*:*Grammar*'

sanitize-build: $(VENV)/.tools
	$(call configure,build/asan,-DAOTLLM_CPU_ISAS=avx2 -DAOTLLM_SANITIZE=address$(comma)undefined)
	$(CMAKE) --build build/asan --target aotllm_tests -j $(JOBS)
	$(call configure,build/tsan,-DAOTLLM_CPU_ISAS=avx2 -DAOTLLM_SANITIZE=thread)
	$(CMAKE) --build build/tsan --target aotllm_tests -j $(JOBS)

FUZZ_SECONDS ?= 60
fuzz: $(VENV)/.installed-test  ## Fuzz the readers of untrusted files, FUZZ_SECONDS (60) each
	$(MAKE) --no-print-directory -j $(JOBS) fuzz-gguf fuzz-safetensors fuzz-lora
fuzz-%:
	$(BIN)/python tests/fuzz/fuzz_$*.py -max_total_time=$(FUZZ_SECONDS)

CPP_FILES = git ls-files '*.h' '*.cc' '*.cu' '*.cuh'
lint: $(VENV)/.installed-test  ## ruff, mypy, clang-format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python scripts/typecheck.py
	$(CPP_FILES) | xargs $(BIN)/clang-format --dry-run --Werror

format: $(VENV)/.installed-test  ## Rewrite sources in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(CPP_FILES) | xargs $(BIN)/clang-format -i

wheel: $(VENV)/.tools  ## dist/aotllm-*.whl
	$(BIN)/pip wheel --quiet --no-build-isolation --no-deps -w dist .

# pip of $(PYTHON) makes a build environment of its own; compiler, headers and cmake are ours. With the generator of `make
# cuda` ccache finds its objects again (names are relative to where the compiler runs).
wheel-cuda: $(VENV)/.tools-cuda  ## The same with target cuda; PYTHON=… makes one for another Python
	$(CUDA_ENV) CMAKE_EXECUTABLE=$(abspath $(CMAKE)) CMAKE_GENERATOR="Unix Makefiles" CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) \
	  $(PYTHON) -m pip wheel --quiet --no-deps -C "build-dir=build/cuda-{wheel_tag}" $(CUDA_OPTIONS:%=-C cmake.define.%) -w dist .

clean:  ## Remove builds; keep .venv and downloaded models
	rm -rf build dist .cache

# --- plumbing ---------------------------------------------------------------------------------------------------------

comma := ,
space := $(subst ,, )

$(VENV)/.tools: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "aotllm needs Python 3.10 or newer; set PYTHON=…")'
	@command -v c++ >/dev/null || { echo "aotllm needs a C++20 compiler: apt-get install g++"; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	  { echo "python3 cannot make virtual environments here: apt-get install python3-venv"; exit 2; }
	$(BIN)/pip install --quiet "scikit-build-core>=0.11" "pybind11>=2.13" "cmake>=3.22" ninja
	@touch $@

# cmake looks for lib64 and libcudart.so; NVIDIA's wheels have lib and libcudart.so.13. CUTLASS is headers, whose package
# asks for many others that only its Python side needs.
$(VENV)/.tools-cuda: $(VENV)/.tools
	$(BIN)/pip install --quiet --no-deps "nvidia-cutlass==4.2.*" $(if $(NVCC),,$(PYPI_NVCC))
	@$(if $(NVCC),:,cd $(VENV)/lib/python3*/site-packages/nvidia/cu13 && ln -sfn lib lib64 && ln -sf libcudart.so.13 lib/libcudart.so)
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
$(3) $(CMAKE) -S . -B $(1) -DCMAKE_BUILD_TYPE=Release -DAOTLLM_PYTHON=OFF -DAOTLLM_TESTS=ON $(2) > $(1).log || { cat $(1).log; exit 1; }
endef

FORCE:
