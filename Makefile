# make train   train a ResNet on two MPI ranks        make test   everything CI checks
# Both set up .venv by themselves. On a machine without a GPU, the CPU build of torch is smaller:
#   make train TORCH_BUILD=cpu
PYTHON ?= python3
# of torch and torchvision alike, which must be of one: cpu, cu130, ...; that of the package index
TORCH_BUILD ?=
RANKS ?= 2
# twice the cores: half of the tests wait for a process to start or for time to pass
WORKERS ?= 4
BIN := .venv/bin
# packages beside the core, which import it: each has its own pyproject.toml and tests
WINGS := wings/rl wings/messages wings/auxnet wings/samplers wings/hpsgd wings/transformers
PROJECTS := pyproject.toml $(WINGS:%=%/pyproject.toml)
TESTS := tests $(WINGS:%=%/tests)
INSTALL := pip install --quiet $(TORCH_BUILD:%=--extra-index-url https://download.pytorch.org/whl/%) \
	$(PIP_FLAGS) --editable '.[mpi,zoo,dev,docs]' $(WINGS:%=--editable %)
# those that train, whose figures the processor rounds; the others are of processes, files and words
TRAIN := bench data links method networks rounds training
TRAINING := tests/solvers $(TRAIN:%=tests/hybrid/%) $(WINGS:%=%/tests) \
	tests/test_docs.py tests/test_settings_act.py
# other processors, and other numbers of threads than one
MACHINES ?= ATEN_CPU_CAPABILITY=default ATEN_CPU_CAPABILITY=avx2 \
	ONEDNN_MAX_CPU_ISA=SSE41 ONEDNN_MAX_CPU_ISA=AVX2 \
	OMP_NUM_THREADS=1 OMP_NUM_THREADS=2 OMP_NUM_THREADS=4
# on one host nobody else needs a port: see docs/security.md
PORTS := PMIX_MCA_ptl_base_if_include=127.0.0.0/8 OMPI_MCA_btl=^tcp
# mpirun refuses root and more ranks than cores unless told otherwise
MPI_ENV := OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
	PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe $(PORTS)

# the tests start a hundred processes: compiled once, the project's modules are kept for the next
export PYTHONDONTWRITEBYTECODE :=

.PHONY: train test checks tests docs test-slow test-machines test-versions coverage faults audit \
	bench gpu-bench clean

train: .venv/ready
	$(MPI_ENV) $(BIN)/mpirun -n $(RANKS) $(BIN)/hybrid train

test: .venv/ready
	$(MAKE) --no-print-directory --jobs 2 checks tests

checks: .venv/ready docs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python .ci/audit.py

tests: .venv/ready
	$(BIN)/pytest $(TESTS) -n $(WORKERS)

# the site, into build/site; a broken link or any other warning is a failure, which --quiet would hide
docs: .venv/ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# and the property tests with many random cases in place of a few that are always the same
test-slow: .venv/ready
	$(BIN)/pytest $(TESTS) -m "(slow or hypothesis) and not gpu" --hypothesis-profile long --timeout 7200

# no verdict may depend on the machine: each of these is one, and so is a busy one at the end
test-machines: .venv/ready
	@status=0; \
	for machine in $(MACHINES); do \
		echo $$machine; \
		env $$machine $(BIN)/pytest $(TRAINING) -n $(WORKERS) || status=1; \
	done; \
	echo nice 19, beside two busy processes; \
	nice -n 19 sh -c 'while :; do :; done & one=$$!; while :; do :; done & \
		trap "kill $$one $$!" EXIT INT TERM; $(BIN)/pytest $(TRAINING) -n $(WORKERS)' || status=1; \
	exit $$status

# with the lowest declared versions of all packages, and with the newest: docs/tutorial.md
test-versions:
	mkdir -p build
	grep -ohE '"[A-Za-z][^">]*>=[^"]*"' $(PROJECTS) | tr -d '"' | sed -E -e '/^setuptools/d' \
		-e 's/\[.*\]//; s/>=/==/; s/^(torch|torchvision)(==.*)/\1=\2$(TORCH_BUILD:%=+%)/' >build/lowest.txt
	: >build/newest.txt
	@status=0; for versions in lowest newest; do \
		echo $$versions; \
		$(PYTHON) -m venv build/$$versions && \
		build/$$versions/bin/$(INSTALL) --upgrade --upgrade-strategy eager \
			--constraint build/$$versions.txt && \
		build/$$versions/bin/pytest $(TESTS) -n $(WORKERS) || status=1; \
	done; exit $$status

coverage: .venv/ready
	$(BIN)/pytest $(TESTS) -n $(WORKERS) --cov --cov-report=term:skip-covered

audit: .venv/ready
	$(BIN)/python .ci/audit.py

faults: .venv/ready
	$(BIN)/python -m tests.faults --runs 200 --seed 0 --out docs/benchmarks/faults.json
	$(BIN)/python -m tests.faults --runs 100 --seed 0 --out docs/benchmarks/faults_torchrun.json
	$(BIN)/python -m tests.faults --runs 50 --seed 0 --replicas 2 --out docs/benchmarks/faults_grid.json

bench: .venv/ready
	$(BIN)/python docs/benchmarks/overhead.py
	$(MPI_ENV) $(BIN)/mpirun -n 2 $(BIN)/python docs/benchmarks/sweeps.py
	$(MPI_ENV) $(BIN)/mpirun -n 2 --bind-to none $(BIN)/hybrid bench --model resnet20

# on a machine with a GPU; BIN=FOLDER takes the interpreter there as it is, and makes no .venv
gpu-bench: $(if $(filter .venv/bin,$(BIN)),.venv/ready)
	$(firstword $(wildcard $(BIN)/python $(BIN)/python3) $(BIN)/python) docs/benchmarks/gpu_all.py

.venv/ready: $(PROJECTS) constraints.txt
	$(PYTHON) -m venv .venv
	mkdir -p build
	sed '/^torch/s/$$/$(TORCH_BUILD:%=+%)/' constraints.txt >build/constraints.txt
	$(BIN)/$(INSTALL) --constraint build/constraints.txt
	touch $@

clean:
	rm -rf .venv build *.egg-info wings/*/*.egg-info wings/*/build .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage
