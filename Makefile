# `make check CI=true` runs everything that CI runs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# With CI=true, torch and the frameworks of the bridges are installed too. Tests that lack a package or a program are skipped.
TORCH ?= $(if $(CI),torch==2.13.0,)
EXTRAS ?= $(if $(CI),[test$(COMMA)frameworks],[test])
COMMA := ,
# A path file instead of an import hook, which would double the start time of each Python process.
EDITABLE := --config-settings editable_mode=compat
# Number of parallel tests. Tests mostly wait for processes, so eight at a time keep two cores busy; 0 disables xdist.
WORKERS ?= 8
# Tests that measure for tens of seconds or load both cores run on CI, and elsewhere with SLOW=1.
export SLOW
# The parallel tests and their child processes share the compiled modules, also where this variable is set, as in most images.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup system check lint types test bench soak fuzz attack upstream docs demo dashboards rules release clean

setup: $(BIN)/.installed

$(BIN)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile $(EDITABLE) $(TORCH) -e '.$(EXTRAS)'
	$(BIN)/python -m compileall -q exporter
	@# On all cores, whereas pip uses one. Modules for tests and models, which are mostly never imported, are compiled at their import.
	$(BIN)/python -m compileall -qq -j 0 -x '/(models|testing|tests?)/' $(VENV)/lib || true  # a file may need a newer Python
	touch $@

$(BIN)/.demo:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(EDITABLE) -e .
	touch $@

system:
	scripts/install-system-packages

check: lint types test

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/proselint check --config proselint.json README.md ARCHITECTURE.md CHANGELOG.md CONTRIBUTING.md docs/*.md deploy/README.md

types: setup
	$(BIN)/mypy

test: setup system
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

bench: setup
	$(BIN)/python benchmarks/page.py

# Load of a busy node for twenty minutes; SOAK=8h sets another duration.
soak: setup system
	SOAK=$(or $(SOAK),20m) $(BIN)/python benchmarks/soak.py

# All property tests, which include the readers of untrusted bytes, most of them with forty times as many examples. Takes some minutes.
fuzz: setup system
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m hypothesis --hypothesis-profile=fuzz --timeout=0

# Prints the table of docs/SECURITY.md. Takes about eight minutes, on 127.0.0.1.
attack: setup system
	$(BIN)/python benchmarks/attack.py

# Runs the test suites of PyTorch or nv-one-logger, from a checkout, with the compatibility modules.
upstream: setup
	$(BIN)/python benchmarks/upstream.py "$(CHECKOUT)"

docs: setup
	$(BIN)/python docs/generate_metrics.py
	$(BIN)/python docs/generate_configuration.py

demo: $(BIN)/.demo
	$(BIN)/python -m exporter demo

# Generates and checks the dashboards. With DASHRENDER=<directory of dashrender>, also draws them into build/dashboards.
dashboards: setup system
	$(BIN)/python -m dashboards
	$(BIN)/python -m pytest -q tests/deploy/test_dashboards.py tests/deploy/test_dashboards_scenario.py
	@if [ -n "$(DASHRENDER)" ]; then $(BIN)/python -m dashboards.pictures --dashrender "$(DASHRENDER)"; else \
	  echo 'no pictures: make dashboards DASHRENDER=<directory of dashrender>'; fi

# Writes the texts of the alerts into their promtool cases, and the table of the runbook.
rules: setup system
	UPDATE_GOLDEN=1 $(BIN)/python -m pytest -q tests/deploy/test_rules.py tests/status/test_conditions_and_alerts.py

# Builds wheel, source archive, chart and image with checksums, in dist/.
release: setup
	scripts/release $(BIN)/python

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
