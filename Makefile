PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
VLLM := build/vllm/env/bin
VLLM_READY := build/vllm/.ready
# Tests of a file share fixtures; more workers want more memory, about 2 GB each.
PARALLEL := --numprocesses 2 --dist loadfile
# Of `make peers`: the model (a GGUF file is raced as it is), a draft model for methods that need one, who races, on what
# (FILE, FILE:LIMIT or builtin:LIMIT, several of them with spaces between), how long.
MODEL := smollm2-135m
DRAFT :=
PEERS := transformers,llama.cpp,openvino,vllm
PROMPTS := builtin:4
TOKENS := 128
# Of `make test-vllm`: what pytest is told. Most tests start engines: all together take many minutes.
TESTS := -m vllm tests/vllm

.PHONY: demo test test-more test-all test-browser test-vllm test-versions lint docs bench peers wheels image clean

demo: $(READY) ## Race plain against speculative decoding on a real model
	$(BIN)/outpace models pull smollm2-135m
	$(BIN)/python -m outpace.bench.demo

test: lint ## Lint, types, and a test of everything: every source, shape, retriever and rule, the real model included
	$(BIN)/pytest $(PARALLEL) -m "not slow and not gpu and not thorough and not browser and not vllm"

test-more: $(READY) ## What CI runs after it: more cases of the same, statistics, several processes
	$(BIN)/pytest $(PARALLEL) -m "thorough and not slow and not gpu and not browser and not vllm"

test-all: lint ## Everything a CPU can run, the long runs on the real model and the full matrix included
	$(BIN)/pytest $(PARALLEL) -m "not gpu and not browser and not vllm"

test-browser: $(READY) ## The playground in headless Chromium: the system's, or playwright's; without one it fails
	$(BIN)/pytest -m browser tests/browser

test-vllm: $(READY) $(VLLM_READY) ## Our drafters inside real vLLM, in an environment of its own; the first time builds it
	$(BIN)/outpace models pull smollm2-135m
	$(VLLM)/python -m pytest $(TESTS)

test-versions: $(READY) ## A short suite at the lowest and highest versions of Python and packages, in build/versions
	$(BIN)/python scripts/check_versions.py

image: ## The steps of deploy/Containerfile in a folder, without a daemon, and the image's size; as root, after `make wheels`
	$(PYTHON) scripts/try_image.py

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(READY) ## The documents as a site, in build/site; every link and every table of options is checked
	$(BIN)/python -m pip install --quiet --constraint constraints/cpu.txt --editable ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(READY) ## The headline table on the built-in prompts
	$(BIN)/outpace models pull smollm2-135m
	$(BIN)/outpace bench --model smollm2-135m --workload builtin --methods transformers,plain,lookup,recycle --out runs/bench-$$(date +%F-%H%M%S)

peers: $(READY) ## Other libraries beside this one, each in an environment of its own; the first time builds them
	$(if $(filter smollm2-135m,$(MODEL)),$(BIN)/outpace models pull $(MODEL))
	$(BIN)/python -m benchmarks.peers --model $(MODEL) $(addprefix --draft ,$(DRAFT)) --peers $(PEERS) $(addprefix --workload ,$(PROMPTS)) --max-new-tokens $(TOKENS)

wheels: $(READY) ## The sdist, and a wheel with compiled kernels for each platform, in dist; takes a quarter of an hour on two cores
	$(BIN)/python -m pip install --quiet --constraint constraints/cpu.txt --editable ".[wheels]"
	rm -rf dist build/libraries
	$(BIN)/python scripts/build_kernels.py build/libraries
	$(BIN)/python -m build --sdist
	for folder in build/libraries/*; do OUTPACE_LIBRARIES=$$folder $(BIN)/python -m build --wheel || exit 1; done
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl
	test -z "$$(find dist -name '*.whl' -size +30000000c)"

$(READY): pyproject.toml constraints/cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "outpace needs Python 3.11 or later, and \
	$(PYTHON) is %d.%d: name another, as in make demo PYTHON=python3.13" % sys.version_info[:2])'
	@echo "setting up .venv: torch, transformers and others, a minute or two"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints/cpu.txt --editable ".[bench,dev]"
	@touch $(READY)

$(VLLM_READY): pyproject.toml constraints/peers/vllm.txt scripts/vllm_environment.py | $(READY)
	@echo "setting up build/vllm: vLLM for the CPU, a minute or two"
	PYTHONPATH=. $(BIN)/python scripts/vllm_environment.py
	@touch $(VLLM_READY)

clean: ## What `make` set up; results in runs stay
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache
