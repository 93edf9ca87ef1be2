# `make` lists the targets. Each is one line over the command line or a tool.
PYTHON ?= python3
VENV ?= .venv
MODELS ?= .cache/models
CONFIG ?= configs/ppocr_rec.toml
DATABASE ?= tuning_db
MINUTES ?= 15
NAME = $(basename $(notdir $(CONFIG)))
OUT ?= out/$(NAME).tvmflow
BIN = $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help demo test check format setup lint compile run verify tasks tune db-verify models clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(VENV)/.base ## set up, then compile, verify and time a real model (PP-OCR text recognition)
	$(BIN)/python scripts/get_models.py $(MODELS) ppocr_rec
	$(BIN)/tvmflow compile configs/ppocr_rec.toml -o out/ppocr_rec.tvmflow
	$(BIN)/tvmflow bench out/ppocr_rec.tvmflow

test: $(VENV)/.full ## set up, then run every check and test
	$(MAKE) --no-print-directory lint
	$(BIN)/python scripts/get_models.py $(MODELS) silero_ifless silero_vad magika ppocr_cls ppocr_rec minilm_l6 effnet_lite0
	$(BIN)/python -m pytest -n 2 --dist loadfile

setup: $(VENV)/.full ## set up everything for working on tvmflow

check: lint ## lint and the fast tests, for the inner loop
	$(BIN)/python -m pytest -n 2 -q tests/unit

format: $(VENV)/.full ## format the code, and mend what the linter can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lint: $(VENV)/.full ## format, style, types and import order
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

models: $(VENV)/.full ## fetch every model of the configs and benchmarks
	$(BIN)/python scripts/get_models.py $(MODELS)

compile: ## compile CONFIG=configs/x.toml into OUT
	$(BIN)/tvmflow compile $(CONFIG) -o $(OUT)

run: ## run OUT of CONFIG on INPUTS=x.npz into OUTPUTS=y.npz; without INPUTS on drawn ones
	$(BIN)/tvmflow run $(OUT) $(if $(INPUTS),--inputs $(INPUTS),--seed 0) $(if $(OUTPUTS),--outputs $(OUTPUTS))

verify: ## hold OUT of CONFIG against its reference again
	$(BIN)/tvmflow verify $(OUT)

tasks: ## list the kernels of CONFIG, and which have a tuning record in DATABASE
	$(BIN)/tvmflow tasks $(CONFIG) --set tuning.database=$(DATABASE)

tune: ## search schedules for CONFIG into DATABASE for MINUTES
	$(BIN)/tvmflow tune $(CONFIG) --set tuning.database=$(DATABASE) --minutes $(MINUTES)

db-verify: ## check DATABASE, or the one that CONFIG names: every fault, every trace replayed
	$(BIN)/tvmflow db verify --database $(DATABASE) $(if $(filter file,$(origin CONFIG)),,--config $(CONFIG))

clean: ## remove what was built; models and the environment stay
	rm -rf out build dist .pytest_cache .mypy_cache .ruff_cache

$(VENV)/.base: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt -e .
	touch $@

$(VENV)/.full: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt -e '.[torch,cuda,rpc,dev]'
	touch $@ $(VENV)/.base
