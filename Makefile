# make demo    train on 4 ranks on this machine     make test    the whole test-suite
# make lint    ruff, codespell, mypy                make test-3  the tests for 3 ranks
# make docs    HTML into docs/build                 make bench   comparison with the peers
# make test-gpu  checks and timings on a machine with one NVIDIA GPU (docs/gpu_evidence.md)
#
# Everything is installed from pip into virtual environments below this folder:
# no MPI or GPU is needed, only python3 >= 3.11 with its venv module. The tests of NCCL
# need cc and g++, and are skipped without.
# Other names: make demo PYTHON=python3.13 VENV=/tmp/venv
# Some rows only: make bench BENCH="--only one-host --quick" (docs/source/benchmarks.md)

PYTHON ?= python3
VENV ?= .venv
N ?= 4
# Of make test-gpu: which CUDA the driver supports, cuda12 or cuda13. pip has an nvcc
# for the newer one only.
CUDA ?= cuda13
EXTRAS_GPU = $(CUDA)$(if $(filter cuda13,$(CUDA)),$(,)gpu-test)

# The other environments stand beside VENV: one with Open MPI, one with a newer
# Python, one with NCCL's bindings, one with CUDA, one with the peers of the benchmarks,
# one with Sphinx. The suite makes the first three when it needs them.
VENV_OPENMPI = $(VENV)-openmpi
VENV_NEWER = $(VENV)-newer
VENV_NCCL = $(VENV)-nccl
VENV_GPU = $(VENV)-gpu
VENV_BENCH = $(VENV)-bench
VENV_DOCS = $(VENV)-docs
NEWER_PYTHON ?= $(PYTHON)

CONSTRAINTS = constraints/build.txt
BENCH ?=

METADATA = setup.py pyproject.toml $(CONSTRAINTS) communicators/_version.py

.PHONY: demo test test-unit test-nccl test-gpu lint format docs bench clean \
	venv-test venv-openmpi venv-newer venv-nccl venv-gpu venv-bench

demo: $(VENV)/installed-demo
	timeout 600 $(VENV)/bin/mpiexec -n $(N) $(VENV)/bin/python \
	    examples/mnist/train_mnist.py --communicator multi_ring --expect-accuracy 0.95

test: venv-test
	$(VENV)/bin/python tests/run_suite.py

test-unit: venv-test
	$(VENV)/bin/python tests/run_suite.py unit jobs

# test-1 ... test-4: the tests that run on so many ranks.
test-%: venv-test
	$(VENV)/bin/python tests/run_suite.py ranks-$*

test-nccl: venv-test
	$(VENV)/bin/python tests/run_suite.py nccl nccl-cupy nccl-pynccl

# CUDA's libraries come from pip; the driver does not, and without it and a GPU the
# script says so before anything is installed.
test-gpu:
	@$(PYTHON) tests/gpu_tests/run_gpu_tests.py --only-look-for-gpu
	@$(MAKE) --no-print-directory venv-gpu
	@$(VENV_GPU)/bin/python tests/gpu_tests/run_gpu_tests.py --output build/gpu_evidence.md

lint: venv-test
	$(VENV)/bin/python tests/run_suite.py lint

format: venv-test
	$(VENV)/bin/python -m ruff check --fix .
	$(VENV)/bin/python -m ruff format .

docs: $(VENV_DOCS)/installed-docs
	$(VENV_DOCS)/bin/python -m sphinx -W --keep-going -b html docs/source docs/build

# Rows that need root, iproute2 or iperf3 say so where these are missing.
bench: venv-bench
	timeout 3600 $(VENV_BENCH)/bin/python -m benchmarks.run $(BENCH)

clean:
	rm -rf $(VENV) $(VENV_OPENMPI) $(VENV_NEWER) $(VENV_NCCL) $(VENV_GPU) \
	    $(VENV_BENCH) $(VENV_DOCS) build docs/build result

venv-test: $(VENV)/installed-test
venv-openmpi: $(VENV_OPENMPI)/installed-openmpi
venv-newer: $(VENV_NEWER)/installed-newer
venv-nccl: $(VENV_NCCL)/installed-nccl
venv-gpu: $(VENV_GPU)/installed-gpu
venv-bench: $(VENV_BENCH)/installed-bench

# install: $(1) folder, $(2) python, $(3) extras, $(4) options of pip. Old pips do not know
# --build-constraint, so the environment's own pip is brought up to date first.
# setuptools warns of every editable install, which would look like a fault here.
# The stamp is written last: a broken install is tried again.
define install
	@$(2) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "$(2) is missing or too old: Python 3.11 or newer is needed" \
	         "(other interpreter: make PYTHON=python3.12 ...)" >&2; exit 1; }
	test -x $(1)/bin/pip || $(2) -m venv $(1)
	$(1)/bin/python -m pip install --quiet --upgrade "pip>=25.3"
	PYTHONWARNINGS=ignore $(1)/bin/python -m pip install --quiet \
	    --build-constraint $(CONSTRAINTS) $(4) \
	    --editable ".[$(3)]"
	@touch $@
endef

$(VENV)/installed-demo: $(METADATA)
	$(call install,$(VENV),$(PYTHON),mpich$(,)examples)

$(VENV)/installed-test: $(METADATA)
	$(call install,$(VENV),$(PYTHON),mpich$(,)examples$(,)test$(,)lint)

$(VENV_OPENMPI)/installed-openmpi: $(METADATA)
	$(call install,$(VENV_OPENMPI),$(PYTHON),openmpi$(,)examples$(,)test)

$(VENV_NEWER)/installed-newer: $(METADATA)
	$(call install,$(VENV_NEWER),$(NEWER_PYTHON),mpich$(,)examples$(,)test)

$(VENV_NCCL)/installed-nccl: $(METADATA)
	$(call install,$(VENV_NCCL),$(PYTHON),mpich$(,)examples$(,)test$(,)nccl-test)

$(VENV_GPU)/installed-gpu: $(METADATA)
	$(call install,$(VENV_GPU),$(PYTHON),mpich$(,)examples$(,)test$(,)pynccl$(,)$(EXTRAS_GPU))

$(VENV_BENCH)/installed-bench: $(METADATA) constraints/bench.txt
	$(call install,$(VENV_BENCH),$(PYTHON),mpich$(,)examples$(,)bench,--constraint constraints/bench.txt)

$(VENV_DOCS)/installed-docs: $(METADATA)
	$(call install,$(VENV_DOCS),$(PYTHON),mpich$(,)docs)

# A comma inside an argument of $(call) would end the argument.
, := ,
