# Everything here works on a fresh clone: the first target that needs .venv makes it.
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$python" && break; done)
BIN := .venv/bin
READY := .venv/.ready
PYTEST := $(BIN)/python -m pytest
TESTS := tests/test_architecture.py tests/fast tests/notebooks tests/browser tests/ranks
# Two at once: ranks and kernels wait much of their time. WORKERS=0 wants less memory and more time.
WORKERS ?= 2
SPREAD := -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: help setup tour test test-long test-gpu mutants attack lab lint fmt notebooks execute site length clean

help:
	@echo "make setup      make .venv and install the course into it"
	@echo "make tour       the main job: train on 4 ranks with each technique, compare with one process"
	@echo "make test       every test that a learner runs, two at once (what is missing is skipped, with the reason)"
	@echo "make test-long  the rest: large worlds, soak, every Hypothesis test from a random seed"
	@echo "make test-gpu   what only NVIDIA cards can show; without one all of it is skipped"
	@echo "make mutants    50 changes of a line, one at a time: does a test fail?  N=20 IN=cp SEED=3: another sample"
	@echo "make attack     every exercise against its wrong and right answers;  EX=05 or EX=05-2: these alone"
	@echo "make lab        open JupyterLab on the course"
	@echo "make lint       ruff and mypy;  make fmt  put the code in form"
	@echo "make notebooks  rebuild the notebooks from their .py, outputs kept;  make execute [LESSON=03]  runs them"
	@echo "make site       the course as web pages in out/site: lessons with outputs, plans, the library"
	@echo "make length     what is longer than we aim at (fails nothing)"
	@echo "make clean      remove what was built and measured; .venv and work/ stay"

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "The course needs Python 3.11 or newer: install it, or say make PYTHON=/its/path"; exit 3; }
	"$(PYTHON)" -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt torch
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	@touch $(READY)

tour: $(READY)
	$(BIN)/course tour

test: $(READY)
	@status=0; \
	$(PYTEST) -m "not long and not alone" $(SPREAD) $(TESTS) || status=$$?; \
	$(PYTEST) -m "not long and alone" $(TESTS) || status=$$?; \
	exit $$status

test-long: $(READY)
	$(PYTEST) -m "long or hypothesis" --hypothesis-profile=random $(TESTS)

test-gpu: $(READY)
	$(PYTEST) tests/gpu

mutants: $(READY)
	$(BIN)/python tests/mutants/mutants.py --count $(or $(N),50) --seed $(or $(SEED),0) \
		--at-once $(WORKERS) $(if $(IN),--package $(IN))

attack: $(READY)
	$(BIN)/python tests/attacks/attack.py $(EX)

lab: $(READY)
	$(BIN)/course lab

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tests/support/prose.py

fmt: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

notebooks: $(READY)
	$(BIN)/python -m course_lib.grading.build notebooks exercises solutions

execute: $(READY)
	$(BIN)/python -m course_lib.grading.build --execute $(if $(LESSON),--lesson $(LESSON)) \
		notebooks exercises solutions

site: $(READY)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[site]'
	$(BIN)/python docs/site/build.py

length: $(READY)
	@$(BIN)/python tests/lengths.py

clean:
	rm -rf out build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find course_lib tests notebooks -name __pycache__ -type d -prune -exec rm -rf {} +
