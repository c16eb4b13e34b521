# Every command a contributor needs. `make` alone lists them.

PYTHON ?= python3
JOBS ?= 2
POSTROOM_CHAOS_SECONDS ?= 60
FUZZ_SECONDS ?= 60
FAILOVERS ?= 20
HOURS ?= 1

SEEDS ?= 100

# PYTHON=python3.13 beside an environment of another version gets one of its own: .venv-3.13.
VERSION_OF = $(shell $(1) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
ifneq ($(origin PYTHON),file)
ASKED := $(call VERSION_OF,$(PYTHON))
ifeq ($(ASKED),)
$(error PYTHON=$(PYTHON) does not run here: name an interpreter that does, such as PYTHON=/usr/bin/python3.12)
endif
HAVE := $(if $(wildcard .venv/bin/python),$(call VERSION_OF,.venv/bin/python))
OTHER := $(if $(HAVE),$(if $(filter $(ASKED),$(HAVE)),,-$(ASKED)))
endif
VENV := .venv$(OTHER)
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# A demonstration takes what is installed for contributors, or a small environment of its own.
TRY := $(if $(wildcard $(STAMP)),$(VENV),.venv-demo)
TRIED := $(if $(wildcard $(STAMP)),$(STAMP),$(TRY)/.installed)
TRIED_SPARK := $(if $(wildcard $(STAMP)),$(STAMP),$(TRY)/.installed-spark)
TYPED := $(wildcard src bench tools)
LINTED := $(wildcard src tests bench tools examples docs deploy)

# Tests start hundreds of processes: where bytecode may not be kept, each of them compiles everything again.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: $(shell sed -n "s/^\([a-z-]*\):.*/\1/p" Makefile)

help: ## List the targets
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-19s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "  PYTHON=python3.13   another interpreter, 3.11 to 3.13, in an environment of its own: make test PYTHON=python3.13"
	@echo "  JOBS=4              how many test processes"
	@echo "  ARGS='-k retry'     more arguments for test, bench and chaos"

venv: $(STAMP) ## Create .venv and install Postroom with its tools (only when something changed)

servers: ## Install PostgreSQL's and MariaDB's servers for the tests, where that may be done
	@sh tests/servers/install.sh

mysql: ## Get MySQL's own server from Debian's unstable release into build/mysql, for make storm STORE=mysql (700 MB)
	@sh tests/servers/install_mysql.sh build/mysql

peers: ## Install the queues that the benchmark compares with, where that may be done
	@sh bench/peers_install.sh

demo: $(TRIED) ## See the queue at work: postroom demo --queue-only (50 MB)
	@$(TRY)/bin/postroom demo --queue-only

demo-queue: demo

demo-pipeline: $(TRIED_SPARK) ## See the queue and the data pipeline: postroom demo (with Spark and Java: 1.2 GB)
	@$(TRY)/bin/postroom demo

jar: $(STAMP) ## Build the jar for Spark's SQL tables from src/postroom/spark/jar (needs a JDK)
	$(BIN)/python -m postroom.spark.jar build

test: export POSTROOM_EXAMPLES ?= 0.33
test: $(STAMP) servers ## Run every test that is not slow, at one place each: 6 minutes on 2 cores
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal --durations 10 -m 'not slow' $(ARGS)

test-all: $(STAMP) servers ## Run all tests on all stores and endpoints, but those that start Spark; then some on an overloaded machine
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup --durations 10 --matrix=all -m 'not spark' $(ARGS); \
		whole=$$?; $(if $(ARGS),,$(BIN)/python -m tests.storm.overloaded &&) exit $$whole

test-spark: $(STAMP) ## Run the tests that start Spark: one session, one process
	$(BIN)/python -m pytest --durations 10 --matrix=all -m spark $(ARGS)

test-spark-versions: $(STAMP) ## Try every version of PySpark, each in an environment of its own (4 GB, 1 hour)
	$(BIN)/python -m tests.spark_versions $(ARGS)

docs: $(STAMP) ## Build the site of the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "open site/index.html"

pictures: $(STAMP) ## Draw the pictures of the documentation
	$(BIN)/python -m tools.docs.pictures

celery-suite: $(STAMP) ## Run Celery's and kombu's own tests on Postroom (fetches them; needs redis-server; 20 minutes)
	$(BIN)/python -m tests.celery_suite $(ARGS)

kafka-clients: $(STAMP) servers ## Run outsiders' Kafka clients and their tests against our listener: SUITES="kcat kgo"
	$(BIN)/python -m tests.kafka_clients $(SUITES) $(ARGS)

screenshot: $(STAMP) ## Take the picture of the console that the README shows, by the tests (needs Chromium)
	$(BIN)/python -m pytest -q tests/integration/console/test_looks.py -k light
	cp build/console/light/overview.png docs/pictures/console.png

runbooks: $(STAMP) ## Write the console's runbooks, from their page
	$(BIN)/python -m tools.docs.runbooks

settings: $(STAMP) ## Write the page of all settings, from the code
	$(BIN)/python -m tools.docs.settings

stub: $(STAMP) ## Write what type checkers know of postroom.sync, from the asynchronous client
	$(BIN)/python -m tools.sync_stub

check: $(STAMP) ## Format, lint, types and layers, without changing anything
	$(BIN)/ruff format --check $(LINTED)
	$(BIN)/ruff check $(LINTED)
	$(BIN)/mypy --strict $(TYPED)
	$(BIN)/python -m tools.sync_stub --check
	$(BIN)/python -m tools.docs.pictures --check
	$(BIN)/python -m tools.docs.settings --check
	$(BIN)/python -m tools.docs.runbooks --check
	$(BIN)/python -m pytest -q $(addprefix tests/unit/repository/,test_architecture.py test_glossary.py) \
		tests/docs/test_architecture_page.py

bench: $(STAMP) servers peers ## Measure speed: python -m bench
	$(BIN)/python -m bench $(ARGS)

chaos: $(STAMP) servers ## Kill, pause and cut things off for a while (POSTROOM_CHAOS_SECONDS per test)
	POSTROOM_CHAOS_SECONDS=$(POSTROOM_CHAOS_SECONDS) $(BIN)/python -m pytest tests/chaos --matrix=all \
		--timeout $$(( $(POSTROOM_CHAOS_SECONDS) * 4 + 120 )) --durations 0 $(ARGS)

failover: $(STAMP) servers ## Kill the primary under load, again and again, and let its standby take over (FAILOVERS)
	POSTROOM_FAILOVERS=$(FAILOVERS) $(BIN)/python -m pytest tests/failover --matrix=all -s --durations 0 $(ARGS)

other-databases: $(STAMP) ## Run the store's suite on a server of yours that is none of those tested here: URL=mysql://root@127.0.0.1/mysql
	POSTROOM_OTHER_URL=$(URL) $(BIN)/python -m pytest tests/contract/store/other_database.py -q --tb line $(ARGS)

storm: $(STAMP) servers ## Kill, pause, cut, slow and overload everything for hours: HOURS=1 STORE=sqlite|postgres|mariadb|mysql SEED=7
	$(BIN)/python -m tests.storm --hours $(HOURS) $(if $(STORE),--store $(STORE)) $(if $(SEED),--seed $(SEED)) $(ARGS)

simulate: $(STAMP) ## Run simulated worlds, SEEDS=1000 on one shard and as many on two; SEED=42 runs that one and shows what happened
	$(BIN)/python -m tests.simulation $(if $(SEED),--seed $(SEED),--seeds $(SEEDS)) $(ARGS)
	$(if $(SEED)$(findstring --first,$(ARGS)),,$(BIN)/python -m tests.simulation --first 1000000 --seeds $(SEEDS) $(ARGS))

simulate-breaks: $(STAMP) ## Undo what keeps each invariant, one after the other; a table of the seeds that notice
	$(BIN)/python -m tests.simulation --breaks --seeds $(SEEDS) $(ARGS)

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
	rm -rf .venv .venv-3.* .venv-demo build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src tests $(wildcard bench) -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt | $(BIN)/pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,bench]'
	@touch $@

.venv-demo/.installed: pyproject.toml constraints.txt | .venv-demo/bin/pip
	.venv-demo/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[cli]'
	@touch $@

.venv-demo/.installed-spark: pyproject.toml constraints.txt | .venv-demo/bin/pip
	.venv-demo/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[spark-local]'
	@touch $@ .venv-demo/.installed

# Debian and Ubuntu ship Python without ensurepip; then a venv has no pip.
%/bin/pip:
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
	$(PYTHON) -m venv $(@:/bin/pip=)
