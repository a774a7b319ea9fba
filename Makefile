# One short target each; `make check` is what CI runs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# On CI every foreign program and framework must be there; elsewhere tests that miss one skip and say so.
TORCH ?= $(if $(CI),torch==2.13.0,)
EXTRAS ?= $(if $(CI),[test$(COMMA)frameworks],[test])
COMMA := ,
# Tests mostly wait for processes: four at a time on two cores take half the time; 0 runs them one by one.
WORKERS ?= 4

.PHONY: setup system check lint types test bench soak fuzz attack upstream docs demo dashboards rules release clean

setup: $(BIN)/.installed

$(BIN)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH) -e '.$(EXTRAS)'
	$(BIN)/python -m compileall -q exporter
	touch $@

$(BIN)/.demo:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
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

# A busy node for twenty minutes; SOAK=8h for the patient.
soak: setup system
	SOAK=$(or $(SOAK),20m) $(BIN)/python benchmarks/soak.py

# Every property test, and with them every reader of bytes from outside, on twenty times as many examples: some minutes.
fuzz: setup system
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m hypothesis --hypothesis-profile=fuzz --timeout=0

# The table of docs/SECURITY.md: some eight minutes, on 127.0.0.1.
attack: setup system
	$(BIN)/python benchmarks/attack.py

# Test suites of PyTorch or nv-one-logger, from a checkout, against the compatibility modules.
upstream: setup
	$(BIN)/python benchmarks/upstream.py "$(CHECKOUT)"

docs: setup
	$(BIN)/python docs/generate_metrics.py
	$(BIN)/python docs/generate_configuration.py

demo: $(BIN)/.demo
	$(BIN)/python -m exporter demo

# Regenerates and checks them; with DASHRENDER=<directory of that tool> also draws each, into build/dashboards.
dashboards: setup system
	$(BIN)/python -m dashboards
	$(BIN)/python -m pytest -q tests/deploy/test_dashboards.py tests/deploy/test_dashboards_scenario.py
	@if [ -n "$(DASHRENDER)" ]; then $(BIN)/python -m dashboards.pictures --dashrender "$(DASHRENDER)"; else \
	  echo 'no pictures: make dashboards DASHRENDER=<directory of dashrender>'; fi

# Writes what the alerts say into their cases, and the table of the runbook.
rules: setup system
	UPDATE_GOLDEN=1 $(BIN)/python -m pytest -q tests/deploy/test_rules.py

# Wheel, source archive, chart and image with checksums, in dist/.
release: setup
	scripts/release $(BIN)/python

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
