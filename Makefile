# Everything on a fresh machine with Python 3 and make: `make demo`, `make test`.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.installed
BYTES  := $(VENV)/.compiled
PYTEST := $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

.PHONY: help bytecode demo test test-all test-exhaustive papers fuzz fuzz-emulated fuzz-readers broken mutation campaigns lint types docs clean

help:
	@echo "make demo      tune two layers, export, load in a new process, check, compare (under 3 minutes after installation)"
	@echo "make test      the fast part of the tests, every feature in it (under 10 minutes)"
	@echo "make test-all  the slow tests as well (under 45 minutes); make test-exhaustive: the combinations that it leaves out"
	@echo "make fuzz      10,000 random kernels of this CPU against float64, COUNT=100 for fewer; make fuzz-emulated: 1,000 of CUDA (hours)"
	@echo "make broken    hundreds of kernels with one mistake each, all of which the checks must catch (an hour of processor time)"
	@echo "make fuzz-readers SECONDS=60  coverage-guided inputs for each reader of files and keys"
	@echo "make mutation  COUNT=300 random changes of the source, each against the tests that should notice it (hours; PROCESSES=N)"
	@echo "make campaigns OUT=build/campaigns LIMIT=480  make fuzz, broken and mutation for so many seconds each; again: they go on"
	@echo "make papers    the CPU's part of docs/papers.md, measured on this machine and written into it (about an hour; run nothing else)"
	@echo "make lint      ruff, and the order of imports"
	@echo "make types     mypy"
	@echo "make docs      the documentation with its API reference, in build/docs/site"
	@echo "make clean     remove the environment and build outputs"

# The marker is older than pyproject.toml when the dependencies may have changed: install again.
$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' \
		|| { echo "im2win needs Python 3.10 to 3.13; name one with: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=23"
	$(BIN)/python -m pip install --quiet --no-compile --editable ".[dev]"
	@touch $@

# Bytecode of what is installed: pip would compile it on one CPU.
$(BYTES): $(READY)
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	@touch $@

# Bytecode of what is here, for the many processes that tests start; where it is not written as they run, each would compile it again.
bytecode: $(BYTES)
	@$(BIN)/python -m compileall -qq -j 0 src compute reconstruct schedules tests || true

demo: $(BYTES)
	$(BIN)/im2win demo

test: bytecode
	$(PYTEST) -m "not slow" $(PYTEST_ARGS)

test-all: bytecode
	$(PYTEST) -m "not exhaustive" $(PYTEST_ARGS)

# What test-all leaves out: combinations of three values and more, where each pair of values is in test-all.
test-exhaustive: bytecode
	$(PYTEST) -m exhaustive $(PYTEST_ARGS)

# Both go on where they were stopped; build/fuzz holds how far they are, and what failed.
fuzz: $(BYTES)
	$(BIN)/python tests/fuzz/kernels.py --count $(or $(COUNT),10000) --seed $(or $(SEED),0) $(FUZZ_ARGS)

fuzz-emulated: $(BYTES)
	$(BIN)/python tests/fuzz/kernels.py --target cuda --count $(or $(COUNT),1000) --seed $(or $(SEED),0) $(FUZZ_ARGS)

broken: $(BYTES)
	for kernels in cpu cuda reconstructed; do $(BIN)/python tests/fuzz/broken.py $$kernels $(BROKEN_ARGS) || exit 1; done

campaigns: $(BYTES)
	PYTHON=$(BIN)/python benchmarks/campaigns.sh $(or $(OUT),build/campaigns) $(PARTS)

fuzz-readers: $(READY)
	@$(BIN)/python -c 'import atheris' 2>/dev/null || $(BIN)/python -m pip install --quiet --editable ".[fuzz]"
	$(BIN)/python tests/fuzz/readers.py --seconds $(or $(SECONDS),60) $(READERS)

# Drawn once, then applied one by one to copies of the source; it goes on where it was stopped. MUTATION_ARGS="--again survived" repeats those.
MUTANTS = build/mutation/drawn-$(or $(COUNT),300)-$(or $(SEED),0).json

mutation: $(READY)
	@$(BIN)/python -c 'import cosmic_ray' 2>/dev/null || $(BIN)/python -m pip install --quiet --editable ".[mutation]"
	test -f $(MUTANTS) || $(BIN)/python tests/mutation/mutants.py draw --count $(or $(COUNT),300) --seed $(or $(SEED),0) $(MUTANTS)
	$(BIN)/python tests/mutation/mutants.py run $(MUTANTS) --processes $(or $(PROCESSES),1) \
		--json $(or $(JSON),$(subst drawn-,found-,$(MUTANTS))) $(MUTATION_ARGS)

# Files of the device's name, as `im2win report` finds them; benchmarks/gpu/papers.sh measures what is compared on a GPU.
papers: $(BYTES)
	device=$$($(BIN)/python -c 'from im2win.device.cpu import Machine; print(Machine.host().name)') && \
	$(BIN)/python benchmarks/algorithms.py --json benchmarks/studies/$$device/algorithms-b1.json && \
	$(BIN)/im2win bench papers12 --against torch,onnxruntime,openvino --untuned --batch 1 --resume \
		--json benchmarks/results/$$device/papers12-float32-b1.json && \
	$(BIN)/im2win ablation papers12 --json benchmarks/results/$$device/ladder-papers12-float32-b1.json && \
	$(BIN)/im2win report docs/papers.md docs/cpu.md

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/lint-imports

types: $(READY)
	$(BIN)/mypy

docs: $(READY)
	@$(BIN)/python -c 'import material, mkdocstrings_handlers.python' 2>/dev/null || $(BIN)/python -m pip install --quiet --editable ".[docs]"
	$(BIN)/python docs/site.py build/docs/pages
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean:
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .pytest_cache .ruff_cache
