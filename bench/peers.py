"""The libraries that the project is compared with: which of them run here; `python -m bench.peers install`.

Each peer of ``pyproject.toml``'s extra is installed on its own: one that fails keeps none of the others out.
DeepSpeed's Adam is compiled here, before anything is timed.
"""

import os
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

from bench.record import append, missing, parser, row, versions

_ROOT = Path(__file__).resolve().parent.parent


EXTENSIONS = Path(sys.prefix, "torch_extensions")
"""The folder for compiled extensions, for this environment alone: another one compiles against other headers."""


def find_compilers() -> None:
    """Put this environment's ninja where DeepSpeed, which compiles on first use, finds it, and name a folder for it."""
    own = str(Path(sys.executable).parent)
    path = os.environ.get("PATH", os.defpath).split(os.pathsep)
    if own not in path:
        os.environ["PATH"] = os.pathsep.join([own, *path])
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(EXTENSIONS))


def free_port() -> int:
    """Return a TCP port that nobody listens on, for a group of ranks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def deepspeed() -> None:
    from deepspeed.ops.op_builder import CPUAdamBuilder

    find_compilers()
    for lock in Path(os.environ["TORCH_EXTENSIONS_DIR"]).glob("**/lock"):
        lock.unlink()  # of a compilation that was killed: the next would wait for it forever
    CPUAdamBuilder().load(verbose=False)


def torchao() -> None:
    import torch
    from torchao.optim import CPUOffloadOptimizer

    CPUOffloadOptimizer([torch.nn.Parameter(torch.zeros(1))], torch.optim.AdamW)


def optax() -> None:
    import optax

    optax.adamw(1e-3)


def matplotlib() -> None:
    from bench.plots import pyplot

    pyplot()


PEERS: dict[str, Callable[[], None]] = {
    "deepspeed": deepspeed,
    "torchao CPUOffloadOptimizer": torchao,
    "optax": optax,
    "matplotlib": matplotlib,
}
"""A check for each peer that it works here."""


def install() -> int:
    """Install the peers, and return pip's exit status for the last one that failed, or 0."""
    extras = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    environment = {**os.environ, "DS_BUILD_OPS": "0"}
    status = 0
    for requirement in extras["peers"]:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-build-isolation"]
        command = [*pip, "--constraint", str(_ROOT / "constraints.txt"), requirement]
        failed = subprocess.run(command, env=environment).returncode
        if failed:
            print(f"bench.peers: {requirement} could not be installed, see above", file=sys.stderr)
        status = failed or status
    return status


def main(arguments: list[str] | None = None) -> int:
    options = parser("peers", "The libraries that the project is compared with, and which of them run here.")
    options.add_argument("act", nargs="?", choices=("check", "install"), default="check")
    args = options.parse_args(arguments)
    if args.act == "install":
        return install()
    found, absent = [], []
    for name, check in PEERS.items():
        start = time.perf_counter()
        try:
            check()
        except Exception as error:
            absent.append(missing(name, error))
            print(f"{name}: COULD NOT RUN: {absent[-1]['why']}")
        else:
            found.append(row(name, "ready after", "s", [time.perf_counter() - start]))
            print(f"{name}: ready after {found[-1]['p50']:.1f} s")
    known = versions("torch", "deepspeed", "torchao", "jax", "jaxlib", "optax", "numpy", "matplotlib")
    record = {"bench": "peers", "title": "Peers", "config": {}, "versions": known}
    append(args.json, {**record, "rows": found, "ratios": [], "missing": absent, "notes": []})
    return 0


if __name__ == "__main__":
    sys.exit(main())
