# make demo   train the embedded model and show images before and after
# make test   format, lint, types, import layers and every test that a merge must pass
# make docs   serve the site of docs/ on this machine and update it as you write
# make bench  compare the speed of each phase with stock implementations: a table, outputs/bench.json

PYTHON3 ?= python3
VENV := .venv
PYTHON := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed

# Results on the CPU depend on the number of threads. The figures in the README were measured with
# two; the embedded model is too small to gain from more.
OMP_NUM_THREADS ?= 2
export OMP_NUM_THREADS

DEMO := outputs/demo/$(shell date +%Y-%m-%d_%H-%M-%S)

# Test processes that run in parallel, one thread each; the slowest files come first.
TEST_WORKERS ?= 2

.PHONY: install demo test check docs bench clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(PYTHON) || $(PYTHON3) -m venv $(VENV)
	$(PYTHON) -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

# The fastest recipe of docs/recipes.md: learn target images first, then continue with GRPO by place.
demo: $(INSTALLED)
	$(PYTHON) train.py train.method=sft train.steps=10 run_dir=$(DEMO)/targets
	$(PYTHON) train.py train.steps=16 model.start_from=$(DEMO)/targets run_dir=$(DEMO)/grpo
	@echo "browse the images: $(VENV)/bin/glm-grpo gallery $(DEMO)/grpo --serve"

check: $(INSTALLED)
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(PYTHON) -m mypy
	$(VENV)/bin/lint-imports
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build

test: check
	$(PYTHON) -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs serve --livereload --watch CHANGELOG.md --watch LOG.md

bench: $(INSTALLED)
	$(PYTHON) -m benchmarks

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -rf .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
