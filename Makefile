# Everything starts here, on a machine that has Python >= 3.11 and pip: `make demo`, `make test`.
# Another interpreter: `make PYTHON=python3.12 test`.

PYTHON ?= python3
UV := uv==0.13.9
BIN := .venv/bin
READY := .venv/.ready

export UV_HTTP_TIMEOUT := 300
# or it asks the net for a newer version at every run
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1
# or every process that a test starts compiles torch anew
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo docs test tests browser lint format lock clean

help: ## show this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1	\2/' | expand -t 16

setup: $(READY) ## install everything, at the versions of requirements.lock, into .venv

# uv does the installing, here and on servers alike: it takes all packages from the one registry, where the builds of
# torch and torchvision match.
$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "vitlab needs Python 3.11 or newer, and '$(PYTHON)' is not: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@echo "Installing into .venv: about 5 GB on Linux, a minute or a few."
	$(PYTHON) -m venv --without-pip .venv
	$(PYTHON) -m pip --python $(BIN)/python install --quiet $(UV)
	$(BIN)/uv pip install --python .venv --quiet -r requirements.lock
	$(BIN)/uv pip install --python .venv --quiet --no-deps --no-build-isolation -e .
	@touch $@

demo: $(READY) ## what pre-training is worth: a small ViT on 50 handwritten digits, fine-tuned and from scratch
	$(BIN)/vitlab demo

docs: $(READY) ## the documentation as a site, in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

test: $(READY) browser ## all checks: lint, types, documentation, tests
	$(MAKE) --no-print-directory --jobs 2 lint docs tests

tests: $(READY) ## the tests alone
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

# Debian's Chromium, with which the tests look at the pages. As root on Debian it is installed; elsewhere nothing happens,
# and the tests that need it are skipped.
browser: ## a browser for the tests, where it can be had
	@if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "Installing chromium and chromium-driver for the tests of the web pages."; \
	  { timeout 60 apt-get update -qq; DEBIAN_FRONTEND=noninteractive timeout 300 \
	    apt-get install -qq -y --no-install-recommends chromium chromium-driver; \
	  } </dev/null >/dev/null 2>&1 || echo "They cannot be installed here; those tests will be skipped."; \
	else echo "No chromium and chromedriver here, so the tests of the web pages will be skipped."; fi

lint: $(READY) ## format, style and types
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/pyright

format: $(READY) ## rewrite the files as the formatter wants them
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

lock: $(READY) ## choose the newest versions that fit and write them to requirements.lock
	{ echo "# Written by 'make lock'. Markers choose by platform: on Linux the registry's torch is the CUDA build, which runs"; \
	  echo "# on the CPU as well; torchvision's build matches it. Install with uv, not pip, which may mix in other builds."; \
	  $(BIN)/uv pip compile pyproject.toml --extra dev --universal --upgrade --no-header --no-annotate --quiet; \
	} > requirements.lock.new
	mv requirements.lock.new requirements.lock

clean: ## remove the environment and what tools left behind
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
