# Every target sets up what it needs and may be run again at any time.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
BIN := .venv/bin
IMAGES ?= python node

BENCHES := $(filter-out bench/ablation.py,$(sort $(wildcard bench/*.py)))  # the ablation has no gate and wants data

.PHONY: setup demo test bench lint lock engine image clean

setup: .venv/.installed engine  ## .venv with the exact packages, and an engine for the sandbox

.venv/.installed: requirements.lock pyproject.toml
	@bash docker/venv.sh

engine: .venv/.installed
	@bash docker/engine.sh

image: setup  ## the sandbox images, where an engine answers
	@if $(BIN)/python -c 'import docker; docker.from_env(timeout=5).ping()' 2>/dev/null; then \
	  for image in $(IMAGES); do $(BIN)/agentft sandbox build $$image; done; fi

demo: setup  ## the main job, from real packages to a trained and measured agent
	@$(BIN)/agentft demo $(ARGS)

test: image  ## every test
	@$(BIN)/python -m pytest $(ARGS)

bench: image  ## every benchmark with its gates; fails if one of them is missed
	@status=0; for file in $(BENCHES); do echo "== $$file"; $(BIN)/python $$file $(ARGS) || status=$$?; done; exit $$status

lint: .venv/.installed
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

lock: .venv/.installed  ## new exact versions: requirements.lock from pyproject.toml, environment.yml from the lock
	@uv pip compile --quiet --no-header --no-annotate --extra dev pyproject.toml -o requirements.lock
	@sed '/^ *- .*==/d' environment.yml > environment.new
	@sed 's/^/      - /' requirements.lock >> environment.new
	@mv environment.new environment.yml

clean:  ## what tools left; never runs/ or data/
	@rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info
	@find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
