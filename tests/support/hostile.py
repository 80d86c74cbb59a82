"""Files that nobody should open, and a bound for a test that does."""

import os
import signal
import socket
from contextlib import contextmanager


def fifo(path):
    os.mkfifo(path)


def unix_socket(path):
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's whole path has at most 107 bytes
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(path.name)
    finally:
        os.chdir(here)


def device(path):
    path.symlink_to("/dev/zero")


def folder(path):
    path.mkdir()


KINDS = (fifo, unix_socket, device, folder)
SAID = {fifo: "a FIFO", unix_socket: "a socket", device: "a device", folder: "Is a directory"}


def replace(path, kind):
    """Put something else in a file's place."""
    path.unlink(missing_ok=True)
    kind(path)


@contextmanager
def not_forever():
    """Fail in place of blocking for ever, in the main thread."""

    def stop(*_):
        raise AssertionError("blocked: a file was opened or read that never ends")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(60)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
