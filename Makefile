# Every command a contributor needs. `make` alone lists them.

PYTHON ?= python3
JOBS ?= 2
POSTROOM_CHAOS_SECONDS ?= 60
FUZZ_SECONDS ?= 60

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TYPED := $(wildcard src bench tools)
LINTED := $(wildcard src tests bench tools examples docs deploy)

# Tests start hundreds of processes: where bytecode may not be kept, each of them compiles everything again.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help venv servers peers demo demo-queue jar test test-all test-spark test-spark-versions check stub bench chaos fuzz format clean

help: ## List the targets
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "  PYTHON=python3.12   the interpreter for the environment (3.11 or newer)"
	@echo "  JOBS=4              how many test processes"
	@echo "  ARGS='-k retry'     more arguments for test, bench and chaos"

venv: $(STAMP) ## Create .venv and install Postroom with its tools (only when something changed)

servers: ## Install PostgreSQL's and MariaDB's servers for the tests, where that may be done
	@sh tests/servers/install.sh

peers: ## Install the queues that the benchmark compares with, where that may be done
	@sh bench/peers_install.sh

demo: $(STAMP) ## See it work, the queue and the data pipeline: postroom demo
	@$(BIN)/postroom demo

demo-queue: $(STAMP) ## See the queue alone, without Spark
	@$(BIN)/postroom demo --queue-only

jar: $(STAMP) ## Build the jar for Spark's SQL tables from src/postroom/spark/jar (needs a JDK)
	$(BIN)/python -m postroom.spark.jar build

test: export POSTROOM_EXAMPLES ?= 0.33
test: $(STAMP) servers ## Run every test that is not slow, at one place each: 12 minutes on 2 cores
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal --durations 10 -m 'not slow' $(ARGS)

test-all: $(STAMP) servers ## Run all tests on all stores and endpoints, but those that start Spark
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup --durations 10 --matrix=all -m 'not spark' $(ARGS)

test-spark: $(STAMP) ## Run the tests that start Spark: one session, one process
	$(BIN)/python -m pytest --durations 10 --matrix=all -m spark $(ARGS)

test-spark-versions: $(STAMP) ## Try every version of PySpark, each in an environment of its own (4 GB, 1 hour)
	$(BIN)/python -m tests.spark_versions $(ARGS)

stub: $(STAMP) ## Write what type checkers know of postroom.sync, from the asynchronous client
	$(BIN)/python -m tools.sync_stub

check: $(STAMP) ## Format, lint, types and layers, without changing anything
	$(BIN)/ruff format --check $(LINTED)
	$(BIN)/ruff check $(LINTED)
	$(BIN)/mypy --strict $(TYPED)
	$(BIN)/python -m tools.sync_stub --check
	$(BIN)/python -m pytest -q $(addprefix tests/unit/repository/,test_architecture.py test_glossary.py) \
		tests/docs/test_architecture_page.py

bench: $(STAMP) servers peers ## Measure speed: python -m bench
	$(BIN)/python -m bench $(ARGS)

chaos: $(STAMP) servers ## Kill, pause and cut things off for a while (POSTROOM_CHAOS_SECONDS per test)
	POSTROOM_CHAOS_SECONDS=$(POSTROOM_CHAOS_SECONDS) $(BIN)/python -m pytest tests/chaos --matrix=all \
		--timeout $$(( $(POSTROOM_CHAOS_SECONDS) * 4 + 120 )) --durations 0 $(ARGS)

fuzz: $(STAMP) ## Feed random bytes to whatever reads those of strangers (FUZZ_SECONDS for each target)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[fuzz]'
	for target in frames kafka requests replies others batches sessions http_bodies http_bytes; do \
		$(BIN)/python -m tests.fuzz $$target -max_total_time=$(FUZZ_SECONDS) -max_len=8192 -rss_limit_mb=1024 \
			-artifact_prefix=/tmp/postroom-fuzz-$$target- $(ARGS) || exit 1; \
	done

format: $(STAMP) ## Format the code and fix what lint can fix
	$(BIN)/ruff check --fix $(LINTED)
	$(BIN)/ruff format $(LINTED)

clean: ## Remove the environment, caches and builds
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src tests $(wildcard bench) -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt | $(BIN)/pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,bench]'
	@touch $@

# Debian and Ubuntu ship Python without ensurepip; then a venv has no pip.
$(BIN)/pip:
	@command -v $(PYTHON) >/dev/null || { \
		echo "No $(PYTHON) here. Install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Postroom needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1)." >&2; \
		echo "Name a newer one: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		package=$$($(PYTHON) -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])'); \
		if ! command -v apt-get >/dev/null; then \
			echo "$(PYTHON) cannot create environments (no ensurepip): install its venv package." >&2; exit 1; \
		elif [ "$$(id -u)" = 0 ]; then \
			apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $$package; \
		else \
			echo "$(PYTHON) cannot create environments yet. Run this, then make again:" >&2; \
			echo "    sudo apt-get install -y $$package" >&2; exit 1; \
		fi; }
	$(PYTHON) -m venv $(VENV)
