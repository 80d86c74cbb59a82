#!/usr/bin/env bash
# Everything that needs an accelerator, on one machine without a network, in parts of at most 9 minutes each:
#   bench/on_gpu.sh OUT_DIR [a] [b] [c] [d] [e] [f] [g] [h]   (default: all, in this order)
#     a  the tests of both frameworks that need a device, and a short training with each
#     b  a step's time and memory beside AdamW on the device, DeepSpeed, FSDP2 and torchao
#     c  the largest model that trains under 32 GB of device memory
#     d  JAX beside optax, on the device and with its states in pinned_host; on a mesh where there are several
#     e  a model leaves the device and comes back, beside DeepSpeed's offload_states and reload_states
#     f  steps of many micro-batches: block by block, in a loop, in DeepSpeed, and on the device where they fit
#     g  steps with none, a quarter, half and all of the states on the device, beside AdamW there
#     h  steps of 8 k, 32 k, 128 k and 512 k tokens in micro-batches of 8 k, beside AdamW on the device and the others
# Every result goes to OUT_DIR/results.jsonl as soon as it is there; a second call goes on from there. Options, such as
# --again and --only WORDS: python3 -m bench.gpu --help. It builds the kernels if they have not been built. With
# pytest-xdist, PYTEST_ADDOPTS="-n 8" runs the tests in eight processes.
# PyTorch and JAX must be installed (another Python: PYTHON=...), and missing pure wheels (cffi, pycparser, pytest,
# hypothesis, psutil, ...) on PYTHONPATH. Ends non-zero where something failed or the time was up.
set -euo pipefail
out=$(realpath -m "${1:?usage: bench/on_gpu.sh OUT_DIR [a] [b] [c] [d] [e] [f] [g] [h]}")
shift
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
export PYTHONUNBUFFERED=1 XLA_PYTHON_CLIENT_PREALLOCATE=false OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
mkdir -p "$out"
{ lscpu; nvidia-smi; } >"$out/machine.txt" 2>&1 || true
SECONDS=0
"$python" -c "import offload_core; offload_core.kernel_info()" >"$out/build.log" 2>&1 ||
    timeout 180 "$python" setup.py --quiet build_ext --inplace >"$out/build.log" 2>&1 ||
    { cat "$out/build.log"; exit 1; }
exec "$python" -m bench.gpu "$out" --seconds $((540 - SECONDS)) "$@"
