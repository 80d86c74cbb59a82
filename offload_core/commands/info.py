"""``python -m offload_core info``: the machine, the kernels in use, and the speed of its memory."""

import argparse
import json
from dataclasses import asdict

from ..memory.host_memory import format_bytes
from .machine import describe, measure_bandwidths

HELP = "this machine: processors, memory, kernels, versions, measured bandwidth"
EXAMPLE = """example:
  python -m offload_core info"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object; sizes in bytes, rates a second")


def run(args: argparse.Namespace) -> int:
    about = describe()
    bandwidths = measure_bandwidths(about["threads"])
    if args.json:
        print(json.dumps({**about, "bandwidth": {**asdict(bandwidths), "link": None}}))
        return 0
    limit = about["control group limit"]
    versions = [f"{name} {version}" for name, version in about["versions"].items() if version]
    lines = {
        "processor": f"{about['cpu']}, {about['cores']} of {about['cores of the machine']} cores",
        "system": about["system"],
        "memory": f"{format_bytes(about['memory'])}, {format_bytes(about['available memory'])} available",
        "control group": "no limit on memory" if limit is None else f"at most {format_bytes(limit)}",
        "kernels": f"{about['instruction set']} (this processor has {', '.join(about['instruction sets'])})",
        "threads": str(about["threads"]),
        "versions": ", ".join(versions),
        "memory bandwidth": f"{bandwidths.dram / 1e9:.1f} GB/s in the Adam kernel, fp32, read and written",
        "copy bandwidth": f"{bandwidths.copy / 1e9:.1f} GB/s, read and written",
        "link to a device": "not measured; plan takes it as --link-bandwidth",
    }
    width = max(map(len, lines))
    print("\n".join(f"{name:{width}}  {value}" for name, value in lines.items()))
    return 0
