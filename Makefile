# Two commands: `make train` and `make test`. Each sets up .venv first, once.

PYTHON ?= python3
FRONTEND ?= torch
ARGS ?=
PARTS ?=
VENV := .venv
BIN := $(VENV)/bin
# Two files of tests at a time; ARGS="-n 0" for one.
TEST := $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder
SITE_STAMP := $(VENV)/.requirements
BUILD_STAMP := $(VENV)/.built
PEERS_STAMP := $(VENV)/.peers
PACKAGE_STAMP := $(VENV)/.package

.PHONY: train test test-all soak lint docs bench wheel setup clean
.DELETE_ON_ERROR:

train: setup
	$(BIN)/python -m bench.train --frontend $(FRONTEND) $(ARGS)

test: setup
	$(TEST) -m "not slow and not soak" $(ARGS)

test-all: setup
	$(TEST) -m "not soak" $(ARGS)

soak: setup
	$(TEST) -m soak $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --platform darwin
	$(BIN)/clang-format --dry-run --Werror c_src/*.[ch] c_src/tests/*.c

# Pages of docs/ and the reference from docstrings, into build/docs; a warning is an error.
docs: setup
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet docs build/docs

# All parts, or some: make bench PARTS="cpu_adam step" ARGS=--quick
bench: setup $(PEERS_STAMP)
	$(BIN)/python -m bench.run $(ARGS) $(PARTS)

# dist/: a source distribution, and a wheel for this kind of machine that is made from it, tried in an environment of its
# own. ARGS="torch jax" tries the front ends too.
wheel: setup $(PACKAGE_STAMP)
	rm -rf dist build
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/python -m build --outdir build/made
	PATH="$(abspath $(BIN)):$$PATH" $(if $(filter Darwin,$(shell uname)),delocate-wheel --wheel-dir,auditwheel repair --strip --wheel-dir) dist build/made/*.whl
	cp build/made/*.tar.gz dist
	$(BIN)/abi3audit --strict dist/*.whl
	$(PYTHON) -m venv build/tried
	build/tried/bin/python -m pip install --quiet --constraint constraints.txt mypy $(ARGS) dist/*.whl
	cd build && tried/bin/python ../tests/packaging/wheel_check.py types $(ARGS)

setup: $(BUILD_STAMP)

$(SITE_STAMP): pyproject.toml constraints.txt
	@for c in $${CC:-cc gcc clang}; do command -v $$c >/dev/null 2>&1 && exit 0; done; { \
	    echo "make: a C compiler is needed to build the kernels, and none of '$${CC:-cc gcc clang}' was found."; \
	    echo "Install one (Debian, Ubuntu: apt install gcc python3-dev) or name yours: make CC=/path/to/cc $(MAKECMDGOALS)"; \
	    exit 1; }
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "make: Python 3.11 or newer is needed, this is " + sys.version)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt setuptools cffi
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation -e '.[torch,jax,test,bench,lint,docs]'
	touch $@

$(BUILD_STAMP): $(SITE_STAMP) setup.py offload_core/native/_ffi_build.py $(wildcard c_src/*.c c_src/*.h)
	$(BIN)/python setup.py --quiet build_ext --inplace
	touch $@

# One that cannot be installed is tried again the next time, and the results say why it is missing.
$(PEERS_STAMP): $(BUILD_STAMP)
	if $(BIN)/python -m bench.peers install; then touch $@; fi

$(PACKAGE_STAMP): $(SITE_STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation -e '.[package]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info offload_core/native/_offload*.so offload_core/native/_offload.c .hypothesis
