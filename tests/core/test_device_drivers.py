"""Drivers load and launch the kernels of a device: in its own context, from any thread, with a clear error."""

import ctypes
import struct
from pathlib import Path

import pytest

from offload_core.errors import KernelError
from offload_core.memory.pinning import Cuda, Driver, Hip
from tests.support.c_build import run

FAKE_DRIVER = """
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
enum { IN_USE = 1 };
static int contexts[2], current = -1, retained, loaded;
static int failing(const char *what) {
    const char *fails = getenv("FAKE_DRIVER_FAILS");
    return fails && !strcmp(fails, what) ? 2 : 0;
}
static void note(const char *text) {
    FILE *f = fopen(getenv("FAKE_DRIVER_LOG"), "a");
    fprintf(f, "%s\\n", text);
    fclose(f);
}
int cuDriverGetVersion(int *version) { *version = 12080; return 0; }
int cuDeviceGet(int *device, int number) { *device = number; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = device != 1 ? 0 : attribute == 75 ? 9 : attribute == 76 ? 0 : -1;
    return 0;
}
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = &contexts[device]; retained++; return 0; }
int cuCtxPushCurrent_v2(void *context) { current = (int *)context - contexts; return 0; }
int cuCtxPopCurrent_v2(void **context) { current = -1; return 0; }
int hipGetDevice(int *device) { *device = current < 0 ? 0 : current; return 0; }
int hipSetDevice(int device) { current = device == 0 ? -1 : device; return 0; }
static int load(void **module, const void *code) {
    if (current != 1 || memcmp(code, "\\x7f" "ELF\\0code", 9))
        return 201;
    *module = &loaded;
    return failing("load");
}
static int find(void **function, void *module, const char *name) {
    *function = (void *)name;
    return module == &loaded && !strcmp(name, "oc_device_cast") ? 0 : 500;
}
static int launch(unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                  void *stream, void **values, void **extra) {
    char text[200];
    snprintf(text, sizeof text, "%d: %u %u %u, %u %u %u, %u, %lu, %lu %lu %d", current, gx, gy, gz, bx, by, bz, shared,
             (unsigned long)stream, *(unsigned long *)values[0], *(unsigned long *)values[1], retained);
    note(text);
    return extra ? 1 : failing("launch");
}
int cuModuleLoadData(void **module, const void *code) { return load(module, code); }
int hipModuleLoadData(void **module, const void *code) { return load(module, code); }
int cuModuleGetFunction(void **function, void *module, const char *name) { return find(function, module, name); }
int hipModuleGetFunction(void **function, void *module, const char *name) { return find(function, module, name); }
int cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned s,
                   void *stream, void **values, void **extra) {
    return launch(gx, gy, gz, bx, by, bz, s, stream, values, extra);
}
int hipModuleLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                          unsigned s, void *stream, void **values, void **extra) {
    return launch(gx, gy, gz, bx, by, bz, s, stream, values, extra);
}
int current_device(void) { return current; }
"""
CODE = b"\x7fELF\0code"
ARGUMENTS = [struct.pack("Q", 2**47 + 1), struct.pack("q", 3)]


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("driver")
    source, library = folder / "driver.c", folder / "libdriver.so"
    source.write_text(FAKE_DRIVER)
    run("gcc", "-shared", "-fPIC", source, "-o", library)
    return str(library)


@pytest.fixture
def log(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("FAKE_DRIVER_LOG", str(tmp_path / "log"))
    return tmp_path / "log"


def driver_of(vendor: str, library: str) -> Driver:
    return Cuda(1, library) if vendor == "CUDA" else Hip(library, device=1)


@pytest.mark.parametrize("vendor", ["CUDA", "HIP"])
def test_a_kernel_is_loaded_and_launched_on_its_own_device(library, log, vendor):
    driver = driver_of(vendor, library)
    before = ctypes.CDLL(library).current_device()
    function = driver.load(CODE, "oc_device_cast")
    for stream in (0, 2**46):
        driver.launch(function, 7, 256, ARGUMENTS, stream)
    retained = {int(line.split()[-1]) for line in log.read_text().splitlines()}
    assert len(retained) == 1, "the context is retained once"
    assert [line.rpartition(" ")[0] for line in log.read_text().splitlines()] == [
        f"1: 7 1 1, 256 1 1, 0, {stream}, {2**47 + 1} 3" for stream in (0, 2**46)
    ]
    assert ctypes.CDLL(library).current_device() == before


def test_the_driver_says_which_device_and_which_compilers_code_it_takes(library):
    assert Cuda(1, library).architecture() == ("sm_90", 12)
    assert Hip(library).architecture() == ("", 0)


@pytest.mark.parametrize("vendor", ["CUDA", "HIP"])
def test_a_refused_kernel_is_one_clear_error_and_the_thread_is_as_before(library, log, vendor, monkeypatch):
    driver, before = driver_of(vendor, library), ctypes.CDLL(library).current_device()
    monkeypatch.setenv("FAKE_DRIVER_FAILS", "load")
    with pytest.raises(
        KernelError, match=rf"ModuleLoadData failed with {vendor} error 2, expected 0: the device's memory"
    ):
        driver.load(CODE, "oc_device_cast")
    monkeypatch.setenv("FAKE_DRIVER_FAILS", "launch")
    with pytest.raises(KernelError, match=rf"Launch.* failed with {vendor} error 2"):
        driver.launch(driver.load(CODE, "oc_device_cast"), 1, 256, ARGUMENTS, 0)
    with pytest.raises(KernelError, match=rf"ModuleGetFunction failed with {vendor} error 500"):
        driver.load(CODE, "absent")
    assert ctypes.CDLL(library).current_device() == before


@pytest.mark.parametrize("driver", [Cuda(0, "libcuda-that-is-not-there.so"), Hip("libcuda-that-is-not-there.so")])
def test_a_missing_driver_says_what_to_install(driver):
    with pytest.raises(KernelError, match=rf"the {driver.vendor} driver library cannot be used .*: install the driver"):
        driver.load(CODE, "oc_device_cast")
