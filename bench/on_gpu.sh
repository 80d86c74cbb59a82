#!/usr/bin/env bash
# Everything that needs a GPU, on one CUDA machine without a network: first the tests, then the figures.
#   bench/on_gpu.sh OUT_DIR
# PyTorch (and JAX) must be installed; missing pure wheels (cffi, pycparser, pytest, pytest-timeout, …) on PYTHONPATH.
# Writes OUT_DIR/tests.log, OUT_DIR/gpu_step/gpu_step.json and .md, OUT_DIR/train-*.log and OUT_DIR/cpu_adam.jsonl;
# ends non-zero where something failed.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:?usage: bench/on_gpu.sh OUT_DIR}
python=${PYTHON:-python3}
mkdir -p "$out"
failed=0
step() { # step NAME COMMAND...
    local name=$1
    shift
    echo "== $name: $*"
    timeout "${STEP_SECONDS:-150}" "$@" >"$out/$name.log" 2>&1 || { echo "== $name failed ($?)"; failed=1; }
    tail -n 15 "$out/$name.log"
}
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv >"$out/machine.txt" 2>&1
lscpu >>"$out/machine.txt"
step build "$python" setup.py --quiet build_ext --inplace
step tests "$python" -m pytest -q -p no:cacheprovider -m gpu tests/gpu/test_gpu.py
step info "$python" -m offload_core info
step cpu_adam "$python" -m bench.parts.cpu_adam --rounds 5 --json "$out/cpu_adam.jsonl"
step train-124m "$python" -m bench.train --preset gpt2-124m --device cuda --steps 30 --out "$out/run-124m"
STEP_SECONDS=240 step gpu_step "$python" -m bench.parts.gpu_step --out "$out/gpu_step"
step train-1.5b "$python" -m bench.train --preset gpt2-1.5b --device cuda --steps 6 --micro-batch 4 --out "$out/run-1.5b"
step train-jax "$python" -m bench.train --frontend jax --preset gpt2-124m --device cuda --steps 20 --out "$out/run-jax"
exit "$failed"
