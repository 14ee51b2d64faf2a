# `make eval` and `make test` do all the set-up, virtual environment included.
#
#   make eval ARGS="--update-dtype fp8 --seeds 5"    flags for the runner
#   make test ARGS="-m 'not slow' tests/formats"     flags for pytest
#   make gates                                       accuracy regression alone
#   make test VENV=/elsewhere PYTHON=python3.12      another environment, another interpreter

VENV ?= .venv
ARGS ?=
# Modules are compiled as they are imported, which few of the thousands installed are.
PIP = $(VENV)/bin/python -m pip --disable-pip-version-check install -q --no-compile -c constraints.txt

# The first interpreter that is 3.11 or 3.12 and can build an environment.
SUPPORTED = import ensurepip, sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))
PYTHON ?= $(shell for p in python3 python3.12 python3.11; do \
	$$p -c "$(SUPPORTED)" 2>/dev/null && { echo $$p; break; }; done)

.PHONY: eval test gates lint clean
# Both ways to install write to the same environment.
.NOTPARALLEL:
.DELETE_ON_ERROR:

eval: $(VENV)/.installed
	$(VENV)/bin/python -m replayssm_quant.eval $(ARGS)

test: lint
	$(VENV)/bin/python -m pytest -n 2 --dist worksteal $(ARGS)
	$(if $(ARGS),,$(VENV)/bin/python -m replayssm_quant.gates check --quiet)

gates: $(VENV)/.installed
	$(VENV)/bin/python -m replayssm_quant.gates check

lint: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

clean:
	rm -rf $(VENV) build dist replayssm_quant.egg-info

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or 3.12 with venv not found;" \
		"name one: make PYTHON=/path/to/python3.12" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

define install
	@echo "installing into $(VENV): torch is large, so the first time takes minutes" >&2
	$(PIP) -e $(1)
endef

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(call install,.)
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(call install,'.[dev]')
	@touch $(VENV)/.installed $@
