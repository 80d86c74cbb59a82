"""The check of the kernels must fail on wrong kernels: one that does nothing, skips its tail, and so on.

Each mutant is the C source with one textual replacement, built as a library of its own and put in the place of
the compiled module.
"""

import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cffi import FFI

from offload_core.native import kernels
from tests.support.c_build import C_SRC, KERNELS, compile_objects, run
from tests.support.kernel_calls import INSTRUCTION_SETS
from tests.support.oracles import check_kernels

# Bits depend on no optimisation level, and this one takes half the compiler's time. cffi finds functions by name.
FLAGS = ("-O0", "-fPIC", "-fvisibility=default")
VECTOR_SETS = tuple(name for name in INSTRUCTION_SETS if name != "scalar")


@dataclass(frozen=True)
class Mutant:
    """A replacement in one file, which the checks of these instruction sets must notice."""

    name: str
    file: str
    old: str
    new: str
    instruction_sets: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.file}: {self.name}"


def mutants(file: str, instruction_sets: tuple[str, ...], *rows: tuple[str, str, str]) -> list[Mutant]:
    return [Mutant(name, file, old, new, instruction_sets) for name, old, new in rows]


MUTANTS = [
    *mutants(
        "kernels_scalar.c",
        ("scalar",),
        (
            "update does nothing",
            "i = begin; i < end; i++) {\n        float g",
            "i = begin; i < begin; i++) {\n        float g",
        ),
        (
            "tail skipped",
            "i < end; i++) {\n        float g",
            "i < begin + (end - begin) / 8 * 8; i++) {\n        float g",
        ),
        ("torch: betas swapped", "v * s->beta2)", "v * s->beta1)"),
        ("optax: betas swapped", "+ s->beta1 * m", "+ s->beta2 * m"),
        ("torch: no weight decay", "p = p * s->decay;", ";"),
        ("torch: no L2", "g = fmaf(p, s->weight_decay, g);", ";"),
        ("optax: no weight decay", "update = update + s->weight_decay * p;", ";"),
        ("optax: no L2", "g = g + s->weight_decay * p;", ";"),
        ("gradient scale dropped", "g = g * s->grad_scale;", ";"),
        (
            "moment's FMA is two roundings",
            "fmaf(s->one_minus_beta1, difference, m)",
            "s->one_minus_beta1 * difference + m",
        ),
        (
            "torch's tail form",
            "fmaf(s->one_minus_beta2 * g, g, v * s->beta2)",
            "fmaf(v, s->beta2, s->one_minus_beta2 * g * g)",
        ),
        ("device parameter not written", "store(segment->param, kind->param_dtype, i, p);", ";"),
        ("states not kept", "if (!kind->keep_states)", "if (1)"),
        ("norm misses its tail", "i < n; i++) {\n        float x", "i < n / 8 * 8; i++) {\n        float x"),
        ("accumulation misses its tail", "i < n; i++)\n        dst[i] =", "i < n / 8 * 8; i++)\n        dst[i] ="),
        ("bf16 truncates", "(bits + 0x7fff + ((bits >> 16) & 1)) >> 16", "bits >> 16"),
        ("bf16 ties go up", "0x7fff + ((bits >> 16) & 1)", "0x8000"),
        ("fp16 truncates", "magnitude += 0xfff + ((magnitude >> 13) & 1);", ";"),
    ),
    *mutants(
        "kernels_simd.h",
        VECTOR_SETS,
        (
            "update does nothing",
            "const adam_constants c = *constants;\n    int64_t i = begin;",
            "const adam_constants c = *constants;\n    int64_t i = end;",
        ),
        ("main loop does nothing", "v_store(a->master + i, p);", ";"),
        (
            "main loop does not keep states",
            "if (!keep_states) {\n            v_store(a->",
            "if (1) {\n            v_store(a->",
        ),
        ("tail does not keep states", "if (!keep_states) {\n            v_store((", "if (1) {\n            v_store(("),
        ("tail skipped", "if (i < end) {\n        lanes grad,", "if (0) {\n        lanes grad,"),
        ("torch: betas swapped", "v_mul(*v, c->beta2))", "v_mul(*v, c->beta1))"),
        ("optax: betas swapped", "v_mul(c->beta1, *m)", "v_mul(c->beta2, *m)"),
        ("torch: no weight decay", "p = v_mul(p, c->decay);", ";"),
        ("optax: no weight decay", "update = v_add(update, v_mul(c->weight_decay, p));", ";"),
        ("gradient scale dropped", "g = v_mul(g, c->grad_scale);", ";"),
        (
            "torch's tail form",
            "v_fma(v_mul(c->w2, g), g, v_mul(*v, c->beta2))",
            "v_fma(*v, c->beta2, v_mul(v_mul(c->w2, g), g))",
        ),
        ("norm misses its tail", "block = memcpy(padded, block, (size_t)(count * size));", "block = padded;"),
        (
            "norm misses its last block, in one window",
            "scan_and_add(NULL, dtype, NULL, x, ONE_WINDOW, upper, bins);",
            ";",
        ),
        ("norm misses its last block, in two", "scan_and_add(NULL, dtype, NULL, x, TWO_WINDOWS, upper, bins);", ";"),
        ("norm takes one window for two", "return lowest >= *upper ?", "return 1 ?"),
        ("norm misses what its windows do", "? TWO_WINDOWS : EACH", "? TWO_WINDOWS : TWO_WINDOWS"),
        ("norm misses its lower window", "add_window(bins, lower, in_lower, below, OC_BLOCK);", ";"),
        ("norm takes the largest bf16 for the smallest", "(uint32_t)(uint16_t)-top16(smallest)", "top16(largest)"),
        ("norm takes the largest for the smallest", "(0u - top32(smallest))", "top32(largest)"),
        ("norm writes over the block that it adds", "scratch[start / OC_BLOCK % 2]", "scratch[0]"),
        (
            "accumulation misses its tail",
            "if (i < n) {\n        lanes addend, sum;",
            "if (0) {\n        lanes addend, sum;",
        ),
        (
            "reduction misses its tail",
            "if (i < n) {\n        lanes addend, total;",
            "if (0) {\n        lanes addend, total;",
        ),
        ("cast misses its tail", "if (i < n) {\n        lanes from,", "if (0) {\n        lanes from,"),
        (
            "reduction misses ranks",
            "r = 1; r < n_sources; r++) {\n        fetch",
            "r = 2; r < n_sources; r++) {\n        fetch",
        ),
        (
            "reduction misses ranks in its tail",
            "r = 1; r < n_sources; r++) {\n            to",
            "r = 2; r < n_sources; r++) {\n            to",
        ),
        ("reduction does not divide", "divisor == 1 ?", "1 ?"),
    ),
    *mutants(
        "sum_squares.h",
        INSTRUCTION_SETS,
        ("norm misses the top digit", "digits[at + 2] += (int64_t)(shifted >> 64);", ";"),
        ("norm takes subnormals for normal", "(biased ? 0x800000 : 0)", "0x800000"),
    ),
    *mutants(
        "kernels_avx2.c",
        tuple({"avx2"} & set(INSTRUCTION_SETS)),
        ("fp16 truncates", "_MM_FROUND_TO_NEAREST_INT", "_MM_FROUND_TO_ZERO"),
        ("bf16 truncates", "_mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))", "_mm256_setzero_si256()"),
    ),
    *mutants(
        "kernels_avx512.c",
        tuple({"avx512"} & set(INSTRUCTION_SETS)),
        ("fp16 truncates", "_MM_FROUND_TO_NEAREST_INT", "_MM_FROUND_TO_ZERO"),
        ("bf16 truncates", "_mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))", "_mm512_setzero_si512()"),
    ),
    *mutants(
        "kernels_neon.c",
        tuple({"neon"} & set(INSTRUCTION_SETS)),
        ("bf16 truncates", "vaddq_u32(odd, vdupq_n_u32(0x7fff))", "vdupq_n_u32(0)"),
    ),
]

# How many mutants each source has; a row that is lost or dropped with a renamed file shows here.
COUNTS = {
    "kernels_scalar.c": 18,
    "kernels_simd.h": 26,
    "sum_squares.h": 2,
    "kernels_avx2.c": 2,
    "kernels_avx512.c": 2,
    "kernels_neon.c": 1,
}


def includes(source: Path, file: str) -> bool:
    """Whether a source is a file of this name, or includes it."""
    text = source.read_text()
    headers = [line.split('"')[1] for line in text.splitlines() if line.startswith('#include "')]
    return source.name == file or file in headers or any(includes(source.parent / h, file) for h in headers)


@pytest.fixture(scope="module")
def sound_objects(tmp_path_factory) -> dict[str, Path]:
    """The unmutated objects, built once: a mutant rebuilds only what it touches."""
    return compile_objects(KERNELS, tmp_path_factory.mktemp("sound"), *FLAGS)


@pytest.fixture
def use_library(monkeypatch, tmp_path):
    """Link objects and put the library in the place of the compiled module."""

    def use(objects: dict[str, Path]) -> None:
        library = tmp_path / "kernels.so"
        run("gcc", "-shared", "-pthread", *objects.values(), "-o", library, "-lm")
        ffi = FFI()
        ffi.cdef((C_SRC / "api.h").read_text())
        monkeypatch.setattr(kernels, "ffi", ffi)
        monkeypatch.setattr(kernels, "lib", ffi.dlopen(str(library)))

    return use


def test_every_source_with_kernels_has_its_mutants():
    assert dict(Counter(mutant.file for mutant in MUTANTS)) == COUNTS
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in MUTANTS}) == len(MUTANTS), "a mutant stands twice"
    assert set(COUNTS) == {path.name for path in C_SRC.glob("*.[ch]")} - {
        *("api.h", "offload_core.h", "target.h"),  # hold no arithmetic
        *("dispatch.c", "pool.c"),  # c_src/tests/test_kernels.c checks them
    }


def test_the_sound_kernels_pass(sound_objects, use_library):
    use_library(sound_objects)
    for instruction_set in INSTRUCTION_SETS:
        check_kernels(instruction_set)


def cases() -> Iterator[Any]:
    """Each mutant with each of its instruction sets. Those of the vector code that all sets share are slow: each takes
    the compiler seconds."""
    for mutant in MUTANTS:
        if not mutant.instruction_sets:
            skipped = pytest.mark.skip("this processor lacks the instruction set")
            yield pytest.param(mutant, "", marks=skipped, id=str(mutant))
        for name in mutant.instruction_sets:
            slow = mutant.file == "kernels_simd.h"
            yield pytest.param(mutant, name, marks=[pytest.mark.slow] * slow, id=f"{mutant}, {name}")


@pytest.mark.parametrize(("mutant", "instruction_set"), [*cases()])
def test_the_check_fails_on_a_mutant(mutant, instruction_set, sound_objects, use_library, tmp_path):
    for file in C_SRC.glob("*.[ch]"):
        shutil.copy(file, tmp_path)
    text = (tmp_path / mutant.file).read_text()
    assert text.count(mutant.old) == 1, f"{mutant.file} does not hold once what this mutant replaces"
    (tmp_path / mutant.file).write_text(text.replace(mutant.old, mutant.new))
    source = tmp_path / f"kernels_{instruction_set}.c"
    assert includes(source, mutant.file)
    use_library(sound_objects | compile_objects([source], tmp_path, *FLAGS))
    with pytest.raises(AssertionError):
        check_kernels(instruction_set)
