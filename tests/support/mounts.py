"""File systems of a test's own."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(folder: Path, *options: str) -> Iterator[Path]:
    """Mount a file system in memory there, of 1 MiB unless the options say its size. Only root can; else skip."""
    command = ["mount", "-t", "tmpfs", "-o", ",".join(["size=1m", *options]), "tmpfs", str(folder)]
    if os.geteuid() or shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("file systems can be mounted by root only")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
