# Two commands: `make train` and `make test`; `make help` names the others. Each sets up .venv first, once.

PYTHON ?= python3
FRONTEND ?= torch
ARGS ?=
# What make lint checks types for.
PLATFORMS ?= linux darwin
PARTS ?=
VENV := .venv
BIN := $(VENV)/bin
# Threads that spin while they wait make steps many times as long where other processes are busy (docs/troubleshooting.md).
PASSIVE := OMP_WAIT_POLICY=$${OMP_WAIT_POLICY:-passive}
# Three files of tests at a time, for two processors: ranks wait for each other. ARGS="-n 0" for one.
SIDE_BY_SIDE := -n 3 --dist loadfile --no-loadscope-reorder
# Where it is set, each of the processes that tests start compiles all modules again: a second each.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q
TEST := $(PYTEST) $(SIDE_BY_SIDE)
BUILD_STAMP := $(VENV)/.built
PEERS_STAMP := $(VENV)/.peers

.PHONY: help train prove demo demo-disk quick test test-times test-integrations test-all with-deepspeed soak lint docs bench wheel setup integrations pins check-pins clean
.DELETE_ON_ERROR:

help:
	@echo "make train       train a small GPT (FRONTEND=jax, PYTHON=python3.12, ARGS=--help)"
	@echo "make prove       one small training in about eighty ways, compared bit for bit"
	@echo "make demo        train GPT-2 124M, for a GPU"
	@echo "make demo-disk   train 3 B parameters in 4 GiB of memory, on a disk"
	@echo "make test        every law once, in minutes; make quick runs a few, test-integrations, test-all and soak more"
	@echo "make lint docs bench wheel pins check-pins clean: see CONTRIBUTING.md"

train: $(VENV)/.has-$(FRONTEND) $(BUILD_STAMP)
	$(PASSIVE) $(BIN)/python -m bench.train --frontend $(FRONTEND) $(ARGS)

# One small training in about eighty ways, compared bit for bit (ARGS="--quick").
prove: setup
	$(PASSIVE) $(BIN)/python -m offload_core prove $(ARGS)

# GPT-2 of 124 M parameters, 20 steps beside plain AdamW: for a machine with a GPU.
demo: $(VENV)/.has-$(FRONTEND) $(BUILD_STAMP)
	$(PASSIVE) $(BIN)/python -m bench.train --frontend $(FRONTEND) --preset gpt2-124m --compare 20 --steps 100 $(ARGS)

# A GPT of 3 B parameters whose states and parameters lie on disk (ARGS="--nvme-path FOLDER"): 37 GB of it, 4 GiB of memory.
demo-disk: $(VENV)/.has-torch $(BUILD_STAMP)
	$(PASSIVE) $(BIN)/python -m bench.disk_demo $(ARGS)

# One law of each kind, in two minutes: before a commit.
quick: setup
	$(TEST) -m "quick and not slow and not integration" $(ARGS) $$(grep -rl --include='test_*.py' 'mark\.quick' tests)

# Every law once: of those with many cases it draws some, others with each commit.
test: setup
	$(TEST) -m "not slow and not soak and not integration" --ignore=tests/integrations $(ARGS)

# The processor time of its files, into tests/ledger.tsv, which make lint checks; FILES="tests/core/test_ring.py": of these.
test-times: setup
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m tests.ledger measure $(SIDE_BY_SIDE) $(ARGS) $(FILES)

# The same with other libraries: transformers, Lightning, TRL, flax, ray and so on, which it installs.
test-integrations: integrations
	$(TEST) -m "integration and not slow and not soak" $(ARGS) tests/integrations tests/laws \
	    $$(grep -rl --include='test_*.py' --exclude-dir=integrations 'mark\.integration' tests)

# What is too slow for that, in parts; make test-all PART=waits runs one, PART=share the one that the commit chooses.
test-all: integrations
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m tests.parts $(if $(PART),--part $(PART)) $(SIDE_BY_SIDE) $(ARGS)

# The core, the kernels and JAX's laws on other Pythons, each in an environment of its own; one that is not here is named.
# pyenv's are taken from their folders, as its commands work for the chosen version alone.
other-%: private OTHER = $(firstword $(wildcard $(HOME)/.pyenv/versions/$*.*/bin/python3) python$*)
other-%: $(BUILD_STAMP)
	@if ! $(OTHER) -c 'import venv' 2>/dev/null; then echo "make: Python $* is not here: its tests are skipped"; else \
	    echo "make: Python $*: installing jax and 15 small packages into $(VENV)-$*"; \
	    $(OTHER) -m venv $(VENV)-$* && \
	    $(VENV)-$*/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt '.[jax,bench,laws]' && \
	    $(VENV)-$*/bin/python -m pytest -q -n 2 -m "not slow and not soak" -p no:cacheprovider $(ARGS) \
	        tests/kernels tests/core tests/laws tests/jax_frontend/test_jax.py; fi

# Tests that compare with DeepSpeed, where it is installed as one of bench's peers: FILES of them.
with-deepspeed: setup $(PEERS_STAMP)
	@$(BIN)/python -c 'import deepspeed' >/dev/null 2>&1 || { \
	    echo "make: DeepSpeed is not installed (pip's words are above), and its tests would be skipped"; exit 1; }
	DS_ACCELERATOR=cpu $(BIN)/python -m pytest -q -m "not soak" $(ARGS) $(FILES)

soak: integrations
	$(TEST) -m soak $(ARGS)

lint: integrations $(VENV)/.has-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m tests.ledger
	@echo "$(BIN)/mypy, for $(PLATFORMS) at a time"
	@for platform in $(PLATFORMS); do \
	    $(BIN)/mypy --platform $$platform --cache-dir .mypy_cache/$$platform & all="$$all $$!"; done; \
	    for each in $$all; do wait $$each || failed=1; done; [ -z "$$failed" ]
	$(BIN)/clang-format --dry-run --Werror c_src/*.[ch] c_src/tests/*.c tests/support/simulated/*.cpp

# Pages of docs/ and the reference from docstrings, into build/docs; a warning is an error.
docs: integrations $(VENV)/.has-docs
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet docs build/docs

# All parts, or some: make bench PARTS="update step" ARGS=--quick
bench: setup $(PEERS_STAMP)
	$(BIN)/python -m bench.run $(ARGS) $(PARTS)

# dist/: a source distribution, and a wheel for this kind of machine that is made from it, tried in an environment of its
# own, and then as its users will have it: with torch and jax, without a compiler. ARGS="torch jax" checks the bits of the
# front ends, too.
wheel: setup $(VENV)/.has-package
	rm -rf dist build
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/python -m build --outdir build/made
	PATH="$(abspath $(BIN)):$$PATH" $(if $(filter Darwin,$(shell uname)),delocate-wheel --wheel-dir,auditwheel repair --strip --wheel-dir) dist build/made/*.whl
	cp build/made/*.tar.gz dist
	$(BIN)/abi3audit --strict dist/*.whl
	$(PYTHON) -m venv build/tried
	build/tried/bin/python -m pip install --quiet --constraint constraints.txt mypy $(ARGS) dist/*.whl
	cd build && tried/bin/python ../tests/packaging/wheel_check.py types $(ARGS)
	$(PYTHON) tests/packaging/first_use.py dist/*.whl dist/*.tar.gz

setup: $(VENV)/.has-test $(BUILD_STAMP)
integrations: $(VENV)/.has-integrations $(BUILD_STAMP)

# --- set-up: .venv, with what a command needs, installed once -------------------------------------------
# SYSTEM=1 takes the torch or jax that PYTHON has, in a .venv that sees them; PYTHON=python3.12 takes another Python.

# A half-made .venv, and one of another Python than the one that is asked for, are made anew.
ifeq ($(filter torch jax,$(FRONTEND)),)
$(error FRONTEND=$(FRONTEND), expected torch or jax)
endif
VERSION := print("%d.%d" % sys.version_info[:2])
FOUND := $(shell $(PYTHON) -c 'import sys; $(VERSION)' 2>/dev/null)
ifeq ($(FOUND),)
$(error $(PYTHON) does not run here: install Python 3.11 or newer, or name yours, as in make PYTHON=python3.12)
endif
ifneq ($(wildcard $(VENV)),)
HERE := $(shell $(BIN)/python -c 'import pip, sys; $(VERSION)' 2>/dev/null)
ifneq ($(HERE),$(if $(filter file,$(origin PYTHON)),$(or $(HERE),another),$(FOUND)))
$(info make: $(VENV) is half-made, or of another Python than $(PYTHON): it is made anew)
$(shell rm -rf $(VENV))
endif
endif

PIP = $(BIN)/python -m pip install --disable-pip-version-check $(if $(SYSTEM),,--constraint constraints.txt)
# Before pip. A package without its last file, INSTALLER, was interrupted, and pip would take it for whole.
READY = @rm -rf $$(for info in $(VENV)/lib/python*/site-packages/*.dist-info; do \
        [ -e "$$info/INSTALLER" ] || echo "$$info"; done); \
    free=$$(df -Pk "$${TMPDIR:-/tmp}" | awk 'NR == 2 { print int($$4 / 1024) }'); [ "$${free:-100}" -ge 100 ] || { \
    echo "make: $${TMPDIR:-/tmp} is full ($$free MB free), and pip and the compiler write there: free 100 MB or more, or" \
        "name another folder, as in make TMPDIR=/var/tmp $(MAKECMDGOALS)"; exit 1; }
RELEASE := $(shell sed -n 's/^version = "\(.*\)"$$/\1/p' pyproject.toml)
BUILD_REQUIRES := $(shell sed -n '/^requires = /s/.*\[\(.*\)\]/\1/p' pyproject.toml | tr -d ,)
GPU := $(wildcard /proc/driver/nvidia/version /dev/nvidiactl /dev/kfd /dev/dxg)
TORCH_CPU := https://download.pytorch.org/whl/cpu

$(VENV)/.python:
	@for c in $${CC:-cc gcc clang}; do command -v $$c >/dev/null 2>&1 && exit 0; done; { \
	    echo "make: a C compiler is needed to build the kernels, and none of '$${CC:-cc gcc clang}' was found."; \
	    echo "Install one (Debian, Ubuntu: apt install gcc python3-dev) or name yours: make CC=/path/to/cc $(MAKECMDGOALS)"; \
	    exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "make: Python 3.11 or newer is needed, this is " + sys.version)'
	@$(PYTHON) -c 'import os, sys, sysconfig; h = os.path.join(sysconfig.get_path("include"), "Python.h"); \
	    sys.exit(not os.path.exists(h) and "make: the C headers of Python are needed, and %s is missing (Debian, Ubuntu: apt install python3-dev)" % h)'
	@test -w . || { echo "make: $(CURDIR) cannot be written to: copy it to a folder of yours"; exit 1; }
	@$(PYTHON) -m venv $(if $(SYSTEM),--system-site-packages) $(VENV) >/dev/null || { rm -rf $(VENV); \
	    echo "make: $(PYTHON) -m venv failed (Debian, Ubuntu: apt install python3-venv)"; exit 1; }
	$(READY)
# Python 3.11's venv brings a setuptools that is too old, and hides the one that the system has.
	@$(if $(SYSTEM),$(BIN)/python -m pip uninstall --quiet --yes setuptools 2>/dev/null)
# A PYTHON that is in an environment itself: venv shows the packages of its base alone, so a .pth file names its own.
	@if [ -n "$(SYSTEM)" ]; then $(PYTHON) -c 'import sys, sysconfig; own = map(sysconfig.get_path, ("purelib", "platlib")); \
	    print(*dict.fromkeys(own) if sys.prefix != sys.base_prefix else (), sep="\n")' \
	    > "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/of_python.pth"; fi
	@$(PIP) --quiet $(BUILD_REQUIRES) || { rm -rf $(VENV); echo "make: pip could not install setuptools and cffi"; exit 1; }
	@touch $@

# The checkout is installed, with its kernels, once for all sets: pip would compile them again for each.
$(BUILD_STAMP): $(VENV)/.python pyproject.toml setup.py offload_core/native/_ffi_build.py $(wildcard c_src/*.c c_src/*.h)
	$(READY)
	@echo "make: compiling the kernels: $(words $(wildcard c_src/*.c)) files," \
	    "$$($(BIN)/python -c 'import os; print(len(getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count()))(0)))') at a time"
# setup.py's line for each file is shown as it ends, and the rest of pip's words only if pip fails.
	@start=$$(date +%s); \
	{ PYTHONWARNINGS=ignore $(PIP) --verbose --no-deps --no-build-isolation -e . 2>&1; echo "pip: $$?"; } | { \
	    end=$$(printf '\n.'); said=; while read -r line; do case $$line in \
	        *.c:\ [0-9]*\ s) echo "make: $$line" ;; \
	        pip:\ 0) exit ;; \
	        pip:\ *) ;; \
	        *) said=$$said$$line$${end%.} ;; \
	    esac; done; printf %s "$$said"; echo "make: the kernels could not be compiled (the reason is above)"; exit 1; } && \
	echo "make: compiled, in $$(($$(date +%s) - start)) s"
	@touch $@

# Without a GPU's driver, torch comes without CUDA: 200 MB, not 3 GB.
$(VENV)/.torch: $(VENV)/.python constraints.txt | $(BUILD_STAMP)
	$(READY)
ifeq ($(GPU)$(SYSTEM)$(filter Darwin,$(shell uname)),)
	@echo "make: no GPU driver is here: installing torch without CUDA (about 200 MB; 1 GB on disk)"
	@$(PIP) --quiet --retries 0 --no-deps --index-url $(TORCH_CPU) torch || \
	    echo "make: $(TORCH_CPU) cannot be reached: torch comes with CUDA (about 3 GB)"
endif
	@touch $@

# Of tests/integrations/test_torchtitan.py, 20 MB. torchtitan asks for an older `datasets` than other tests, and does not
# use it there: so without what it asks for.
TITAN := torchtitan==0.3.0 torchdata==0.11.0 torch_checkpointing==0.1.1 spmd_types==0.2.3 einops==0.8.2 \
    tyro==1.0.17 docstring_parser==0.18.0 typeguard==4.6.1

# Of tests/integrations/test_verl.py, 6 MB: without what verl asks for, which has older versions of other tests' libraries.
# For Python 3.11 and 3.12 alone.
VERL := verl==0.9.1 tensordict==0.10.0 hydra-core==1.3.8 omegaconf==2.3.1 antlr4-python3-runtime==4.9.3 \
    codetiming==1.4.0 pyvers==0.2.3 orjson==3.13.0 uvicorn==0.54.0 fastapi==0.165.0 starlette==1.10.0 \
    opentelemetry-api==1.45.2 cachetools==8.0.2

SETS := $(addprefix $(VENV)/.has-,torch jax test integrations lint docs package)
$(VENV)/.has-torch: private WHAT = torch and 15 small packages
$(VENV)/.has-torch: private EXTRAS = torch
$(VENV)/.has-torch: private MORE = tqdm
$(VENV)/.has-torch: $(VENV)/.torch
$(VENV)/.has-jax: private WHAT = jax and 15 small packages (200 MB, 600 MB on disk)
$(VENV)/.has-jax: private EXTRAS = jax,bench
$(VENV)/.has-jax: $(VENV)/.python
$(VENV)/.has-test: private WHAT = torch, jax and what tests need (38 packages, 1.5 GB on disk)
$(VENV)/.has-test: private EXTRAS = torch,jax,laws,bench
$(VENV)/.has-test: $(VENV)/.torch
$(VENV)/.has-integrations: private WHAT = the libraries that tests combine with torch and jax (100 packages, 1.1 GB on disk)
$(VENV)/.has-integrations: private EXTRAS = torch,jax,integrations,bench
$(VENV)/.has-integrations: private BESIDE = TITAN VERL
$(VENV)/.has-integrations: $(VENV)/.has-test
$(VENV)/.has-lint: private WHAT = ruff, mypy and clang-format (50 MB)
$(VENV)/.has-lint: private EXTRAS = lint
$(VENV)/.has-docs: private WHAT = sphinx (20 MB)
$(VENV)/.has-docs: private EXTRAS = docs
$(VENV)/.has-package: private WHAT = what builds and checks wheels (100 MB)
$(VENV)/.has-package: private EXTRAS = package
$(VENV)/.has-lint $(VENV)/.has-docs: $(VENV)/.has-integrations
$(VENV)/.has-package: $(VENV)/.has-test

# The requirements of the installed checkout. With its version, so that pip takes no other project of this name.
$(SETS): pyproject.toml constraints.txt | $(BUILD_STAMP)
	$(READY)
	@echo "make: installing into $(VENV): $(WHAT)"
	@start=$$(date +%s); $(PIP) 'offload-core[$(EXTRAS)]==$(RELEASE)' $(MORE) || { \
	    echo "make: pip could not install it (its words are above); a second call goes on from here"; exit 1; }; \
	$(foreach set,$(BESIDE),$(PIP) --no-deps $($(set)) || echo "make: without $(firstword $($(set))): its test is skipped";) \
	echo "make: installed, in $$(($$(date +%s) - start)) s"
	@touch $@

# Exact versions for every Python from 3.11 on, from the ranges of pyproject.toml; the versions that are there stay.
pins: $(VENV)/.python
	$(PIP) --quiet uv
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --all-extras --no-annotate --no-header \
	    --no-emit-package offload-core $(ARGS) pyproject.toml --output-file constraints.txt
	@for version in 3.11.0 3.12 3.13 3.14; do echo "make: the same for Python $$version"; \
	    $(BIN)/uv pip compile --quiet --python-version $$version --constraint constraints.txt --all-extras \
	        --output-file build/pins-$$version.txt pyproject.toml || exit 1; done

# What each command installs can be had for each Python, in wheels, as pinned: resolved, and not installed.
check-pins: $(VENV)/.python
	@$(PIP) --quiet uv
	@for version in 3.11.0 3.12 3.13 3.14; do for set in "torch log" "jax bench" "torch jax laws bench" "torch jax integrations bench" lint docs package; do \
	    $(BIN)/uv pip compile --quiet --python-version $$version --constraint constraints.txt --only-binary :all: \
	        $$(printf -- '--extra %s ' $$set) --output-file /dev/null pyproject.toml >/dev/null || exit 1; done; \
	    echo "make: Python $$version: every set resolves"; done

# One that cannot be installed is tried again the next time, and the results say why it is missing.
$(PEERS_STAMP): $(VENV)/.has-integrations $(BUILD_STAMP)
	if $(BIN)/python -m bench.peers install; then touch $@; fi

clean:
	rm -rf $(VENV) $(VENV)-* build dist *.egg-info offload_core/native/_offload*.so offload_core/native/_offload.c .hypothesis
