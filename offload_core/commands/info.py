"""``python -m offload_core info``: the machine, the kernels in use, and the speed of its memory."""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ..disk.folders import check_folders, free_bytes
from ..memory.host_memory import format_bytes
from ..native import kernels
from ..support.topology import ranges
from .machine import DiskSpeeds, describe, measure_bandwidths, measure_disk

HELP = "this machine: processors, devices, memory, kernels, versions, measured bandwidth"
EXAMPLE = """example:
  python -m offload_core info
measure a disk for states, too, in 3 seconds and with at most 1 GiB of its space:
  python -m offload_core info --nvme-path /mnt/disk"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--nvme-path",
        action="append",
        metavar="FOLDER",
        help="measure the disk of this folder; repeat it for further disks, which are measured together",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object; sizes in bytes, rates a second")


def run(args: argparse.Namespace) -> int:
    folders = args.nvme_path or []
    check_folders(folders)
    about = describe()
    kernels.bind_workers(about["chosen"]["processors"])
    bandwidths = measure_bandwidths(about["threads"])
    disk = measure_disk(folders) if folders else None
    if args.json:
        of_disk = disk and {"folders": folders, "free": free_bytes(folders), **asdict(disk)}
        print(json.dumps({**about, "bandwidth": {**asdict(bandwidths), "link": None}, "disk": of_disk}))
        return 0
    limit = about["control group limit"]
    versions = [f"{name} {version}" for name, version in about["versions"].items() if version]
    lines = {
        "processor": f"{about['cpu']}, {about['cores']} of {about['cores of the machine']} processors",
        **_nodes(about["nodes"]),
        **{f"device {device['address']}": _device(device) for device in about["devices"]},
        "system": about["system"],
        "memory": f"{format_bytes(about['memory'])}, {format_bytes(about['available memory'])} available",
        "control group": "no limit on memory" if limit is None else f"at most {format_bytes(limit)}",
        "pinned memory": _pinned(**about["pinned memory"]),
        "kernels": f"{about['instruction set']} (this processor has {', '.join(about['instruction sets'])})",
        **_slow_bfloat16(about["why bf16 is slow"]),
        "threads": f"{about['threads']} on {_processors(about['chosen']['processors'])}: {about['chosen']['why']}",
        "versions": ", ".join(versions),
        "memory bandwidth": f"{bandwidths.dram / 1e9:.1f} GB/s in the Adam kernel, fp32, read and written",
        "copy bandwidth": f"{bandwidths.copy / 1e9:.1f} GB/s, read and written",
        "link to a device": "not measured; plan takes it as --link-bandwidth",
        **({} if disk is None else {"disk": f"{', '.join(folders)}: {_disk(disk, free_bytes(folders))}"}),
    }
    width = max(map(len, lines))
    print("\n".join(f"{name:{width}}  {value}" for name, value in lines.items()))
    return 0


def _pinned(registered: bool, limits: Sequence[str]) -> str:
    how = "registered with the device's driver" if registered else "allocated by the device's driver (WSL2)"
    return ". ".join((how, *limits))


def _nodes(nodes: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """A line for each memory node; one line if there is only one."""
    lines = {}
    for each in nodes:
        cpus, cores = each["processors"], each["physical cores"]
        siblings = f", {len(cpus)} with SMT siblings" if len(cpus) > cores else ""
        text = f"{_count(cores, 'physical core')}{siblings}" if cpus else "memory alone"
        lines[f"node {each['node']}"] = f"{text}: {_processors(cpus)}" if cpus and len(nodes) > 1 else text
    return {"node": f"one, {' '.join(lines.values())}"} if len(lines) == 1 else lines


def _slow_bfloat16(why: str | None) -> dict[str, str]:
    return (
        {} if why is None else {"bf16": f"{why}: in PyTorch a matrix product takes 20 to 500 times as long as in fp32"}
    )


def _disk(speeds: DiskSpeeds, free: int) -> str:
    read, write, both = (f"{rate / 1e9:.1f}" for rate in (speeds.read, speeds.write, speeds.both))
    return f"{read} GB/s read, {write} GB/s written, {both} GB/s one after the other; {format_bytes(free)} free"


def _device(device: Mapping[str, Any]) -> str:
    near = "nearest to no known node" if device["node"] is None else f"nearest to node {device['node']}"
    return f"{device['kind']}, {near}, {device['link'] or 'unknown link'}"


def _processors(cpus: Sequence[int]) -> str:
    return f"processor{'s' if len(cpus) > 1 else ''} {ranges(cpus)}"


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'s' if n != 1 else ''}"
