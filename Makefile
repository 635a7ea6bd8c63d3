# Two commands matter to a newcomer: `make demo` and `make test`. Everything they need is set up by themselves.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?=
VENV := .venv
PY := $(VENV)/bin/python
VENV_STAMP := $(VENV)/.stamp
NODE_STAMP := frontend/node_modules/.stamp
ARGS ?=
# Test processes at a time. Most of a process test is waiting for other processes.
JOBS ?= 4

.PHONY: help demo setup test fast lint types fmt wire-schema screenshots clean

help: ## Show the verbs
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: setup ## Controller, three unequal local workers, a run that waits for you in the browser
	@$(PY) -m backend demo $(ARGS)

test: setup ## Every test: pure, sockets, processes, browser
	@$(PY) -m pytest -n $(JOBS) --dist worksteal $(ARGS)

fast: setup ## The tests that start no process
	@$(PY) -m pytest -m "not slow and not browser" $(ARGS)

lint: setup ## Style, import directions
	@$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check . && $(VENV)/bin/lint-imports

types: setup ## Static types
	@$(VENV)/bin/mypy

fmt: setup ## Format
	@$(VENV)/bin/ruff check --fix . && $(VENV)/bin/ruff format .

wire-schema: setup ## Record the wire's messages in wire/schema.json and docs/protocol.md
	@$(PY) -m wire.schema $(ARGS)

screenshots: setup ## Take the README's pictures anew, from a real run in a real browser
	@MARCHLINE_SCREENSHOTS=docs/images $(PY) -m pytest -q tests/e2e/test_e2e_browser.py

clean: ## Remove what make set up and what the demo stored
	rm -rf $(VENV) frontend/node_modules var

setup: $(VENV_STAMP) $(NODE_STAMP)

$(VENV_STAMP): constraints.txt pyproject.toml scripts/setup-python
	@scripts/setup-python "$(PYTHON)" $(VENV)
	@touch $@

$(NODE_STAMP): frontend/package-lock.json scripts/setup-node
	@scripts/setup-node
	@touch $@
