# Two commands matter: `make demo` and `make test`. `make help` lists the rest.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
# Most tests wait for processes more than they compute: more workers than a small machine has cores.
WORKERS ?= 7
# Each worker begins with a part of its own, so that few start a bed, a lab or torch, and helps the others then.
SPREAD := -n $(WORKERS) --dist worksteal
# Tests start thousands of Pythons: none of them is to compile the same modules again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help venv demo test side-by-side quality format unit trainer-tests lab-tests bed-tests conformance bench-deploy soak bench-cli bench-data schema clean

help:  ## what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

venv: $(VENV)/.installed  ## the virtual environment with everything in it

$(VENV)/.installed: pyproject.toml constraints.txt tests/trainer/oracles/requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "make: $(PYTHON) does not run, or is older than 3.11; name a newer one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || \
	  { echo "make: $(PYTHON) has no ensurepip; on Debian and Ubuntu: apt install python3-venv" >&2; exit 2; }
	@echo "making $(VENV): torch, transformers and the tools; a minute or more"
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[trainer,dev]'
	@# A peer that the trainer is compared with; its own requirements would replace torch.
	$(PY) -m pip install --quiet --disable-pip-version-check --no-compile --no-deps -r tests/trainer/oracles/requirements.txt
	@# pip compiles one file after the other, this on every core; some templates are no Python.
	@$(PY) -m compileall -q -j 0 $(VENV)/lib >/dev/null 2>&1 || :
	@touch $@

demo: venv  ## deploy, launch, watch and judge a real training run on the embedded lab (about 2 minutes)
	@PATH="$(abspath $(BIN)):$$PATH" sh recipes/demo/demo.sh

test: venv  ## the whole suite: linters, unit, lab and bed tests, every command in the docs, then the demo
	@$(MAKE) --no-print-directory -j 2 quality side-by-side
	@# Only their files: to collect all the others takes longer than some of these tests.
	$(PY) -m pytest -m "alone and not soak" $$(grep -rlw --include='test_*.py' 'mark\.alone' tests | sort)

side-by-side: venv
	@# In a new checkout every worker would rewrite and compile the same files at the same time.
	@test -d tests/unit/__pycache__ || $(PY) -m pytest --collect-only -qq tests >/dev/null 2>&1 || :
	$(PY) -m pytest $(SPREAD) -m "not soak and not alone" tests

quality: venv  ## ruff check, ruff format --check, mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

schema: venv  ## write docs/recipe.md, docs/hosts.md and docs/schema/ anew from the source
	$(PY) -m docs.reference

format: venv  ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

unit: venv  ## only the fast tests, one part at a time: no root, no lab, no torch
	$(PY) -m pytest $(SPREAD) -m "not soak and not alone" tests/unit

trainer-tests: venv  ## tests of the trainer, on the CPU
	$(PY) -m pytest $(SPREAD) -m "not soak and not alone" tests/trainer

lab-tests: venv  ## whole commands on the embedded lab and on this machine itself (engine `local`): no root
	$(PY) -m pytest $(SPREAD) -m "not soak and not alone" tests/lab tests/local

bed-tests: venv  ## tests on real LXC containers and a real sshd (root)
	$(PY) -m pytest $(SPREAD) -m "not soak and not alone" tests/bed

conformance: venv  ## the table of what the real pct was seen to do, against the stand-in (and a real node)
	$(PY) -m tests.conformance

bench-cli: venv  ## how long the commands take beside a bare `ssh host pct exec` (root)
	$(PY) bench/cli.py

bench-data: venv  ## how quickly data is prepared beside the tokenizer's own batches, and in how much memory
	$(PY) bench/data.py

soak: venv  ## the long campaigns, and the unit tests' properties with many fresh examples
	$(PY) -m pytest $(SPREAD) -m soak tests
	$(PY) -m pytest $(SPREAD) -m "not soak and not alone" --hypothesis-profile fresh tests/unit

bench-deploy: venv  ## deploys beside scp + pct push + pct exec, Ansible and sftp (root; about 12 minutes)
	$(PY) bench/deploy.py

clean:  ## remove what make made
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
