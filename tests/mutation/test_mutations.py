"""The check of the kernels must fail on wrong kernels: one that does nothing, skips its tail, and so on.

Each mutant is the C source with one textual replacement, built as a library of its own and put in the place of
the compiled module.
"""

import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cffi import FFI

from offload_core.native import kernels
from tests.support.c_build import C_SRC, COMPILE_ARGS, KERNELS, compile_objects, not_inlined, run
from tests.support.kernel_calls import INSTRUCTION_SETS
from tests.support.oracles import check_kernels
from tests.support.state_formats import check_formats

# Bits depend on no optimisation level, and this one takes the compiler the least time. cffi finds functions by name.
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
            "i = begin; i < end; i += OC_STATE_BLOCK)\n        update_block",
            "i = begin; i < begin; i += OC_STATE_BLOCK)\n        update_block",
        ),
        ("norm misses its tail", "i < n; i++)\n        add_square", "i < n / 8 * 8; i++)\n        add_square"),
        ("accumulation misses its tail", "i < n; i++)\n        accumulate", "i < n / 8 * 8; i++)\n        accumulate"),
    ),
    *mutants(
        "arithmetic.h",
        ("scalar",),
        (
            "tail skipped",
            "OC_EACH(k, n) {\n        int64_t i = begin + k;\n        uint32_t bits",
            "OC_EACH(k, n / 8 * 8) {\n        int64_t i = begin + k;\n        uint32_t bits",
        ),
        ("torch: betas swapped", "v * k[ADAM_BETA2])", "v * k[ADAM_BETA1])"),
        ("optax: betas swapped", "+ k[ADAM_BETA1] * m", "+ k[ADAM_BETA2] * m"),
        ("torch: no weight decay", "p = p * k[ADAM_DECAY];", ";"),
        ("torch: no L2", "g = fmaf(p, k[ADAM_L2], g);", ";"),
        ("optax: no weight decay", "update = update + k[ADAM_WEIGHT_DECAY] * p;", ";"),
        ("optax: no L2", "g = g + k[ADAM_L2] * p;", ";"),
        ("gradient scale dropped", "g = g * s->grad_scale;", ";"),
        ("moment's FMA is two roundings", "fmaf(w1, difference, m)", "w1 * difference + m"),
        (
            "torch's tail form",
            "fmaf(w2 * g, g, v * k[ADAM_BETA2])",
            "fmaf(v, k[ADAM_BETA2], w2 * g * g)",
        ),
        ("SGD: weight decay is two roundings", "fmaf(p, k[SGD_WEIGHT_DECAY], g)", "g + k[SGD_WEIGHT_DECAY] * p"),
        ("SGD, optax: no weight decay", ": g + k[SGD_WEIGHT_DECAY] * p;", ": g;"),
        ("SGD: the first gradient is damped", "k[SGD_FIRST] != 0", "0"),
        (
            "SGD: the other product is rounded",
            "fmaf(g, k[SGD_ONE_MINUS_DAMPENING], *m * momentum)",
            "fmaf(*m, momentum, g * k[SGD_ONE_MINUS_DAMPENING])",
        ),
        ("SGD, optax: no momentum", "*m = g + momentum * *m;", "*m = g;"),
        ("SGD: Nesterov's momentum is plain", "nesterov = k[SGD_NESTEROV] != 0", "nesterov = 0"),
        ("SGD: Nesterov's FMA is two roundings", "fmaf(*m, momentum, g)", "g + *m * momentum"),
        ("SGD: the step is two roundings", "fmaf(g, -k[SGD_LR], p)", "p + g * -k[SGD_LR]"),
        (
            "Lion: the momentum's parts are swapped",
            "k[LION_BETA1] * *m + k[LION_ONE_MINUS_BETA1] * g",
            "k[LION_BETA2] * *m + k[LION_ONE_MINUS_BETA2] * g",
        ),
        ("Lion: the step has a size", "step = copysignf(1, step);", ";"),
        ("Lion: no weight decay", "step = step + k[LION_WEIGHT_DECAY] * p;", ";"),
        (
            "Lion: the step follows the new momentum",
            "*m = k[LION_BETA2] * *m + k[LION_ONE_MINUS_BETA2] * g;\n",
            "*m = k[LION_BETA2] * *m + k[LION_ONE_MINUS_BETA2] * g;\n    step = *m;\n",
        ),
        ("Adagrad: weight decay is two roundings", "torch ? fmaf(p, decay, g)", "torch ? g + decay * p"),
        ("Adagrad, optax: no weight decay", ": g + decay * p;", ": g;"),
        ("Adagrad: the square is rounded", "fmaf(g, g, *sum)", "g * g + *sum"),
        ("Adagrad, optax: the square is not rounded", ": g * g + *sum;", ": fmaf(g, g, *sum);"),
        ("Adagrad: eps is under the root", "(sqrtf(*sum) + eps)", "sqrtf(*sum + eps)"),
        ("Adagrad, optax: eps is beside the root", "1 / sqrtf(*sum + eps)", "1 / (sqrtf(*sum) + eps)"),
        ("device parameter not written", "store(segment->param, kind->param_dtype, begin + k, p[OC_SLOT(k)]);", ";"),
        ("states not kept", "if (!kind->keep_states)", "if (1)"),
        ("bf16 truncates", "(bits + 0x7fff + ((bits >> 16) & 1)) >> 16", "bits >> 16"),
        ("bf16 ties go up", "0x7fff + ((bits >> 16) & 1)", "0x8000"),
        ("fp16 truncates", "magnitude += 0xfff + ((magnitude >> 13) & 1);", ";"),
        ("elements share random bits", "(uint32_t)(element % OC_STATE_BLOCK)", "0"),
        ("elements are counted from the segment's first", "(uint64_t)(segment->start + i)", "(uint64_t)i"),
        ("half of the key is not used", " ^ (uint32_t)(key >> 32)", ""),
        ("bf16 is rounded to nearest", "(float_bits(x) + random) >> 16", "(float_bits(x) + 0x8000) >> 16"),
        ("moments have the same random bits", "return j ? bits >> (32 - width) :", "return"),
        ("8-bit moments have the random bits of bf16", "format == OC_FLOAT8 ? OC_DROPPED : 16;", "16;"),
        ("a master has its moment's random bits", "bits * OC_HASH_MASTER >> 16", "bits & 0xffff"),
        ("8 bits truncate", "((bits + *random) >> OC_DROPPED)", "(bits >> OC_DROPPED)"),
        (
            "8 bits lose small values",
            "magnitude < least ? fmaf(magnitude, 0.5f, least * 0.5f)",
            "magnitude < least ? least * 0.5f",
        ),
        ("8 bits lose the sign", "float_bits(x) >> 31 << 7", "0"),
        (
            "the largest value has no sign to ignore",
            "float_bits(values[OC_SLOT(k)]) & 0x7fffffff",
            "float_bits(values[OC_SLOT(k)])",
        ),
        (
            "a block with inf is not NaN",
            "scale == OC_NAN_SCALE)\n        return bits_float",
            "0)\n        return bits_float",
        ),
        ("scales have no least", "scale < OC_LEAST_SCALE ? OC_LEAST_SCALE : scale", "scale"),
        ("a tie is not noted", " | (uint32_t)ties[j] << j;", ";"),
        ("a tie is not forgotten", "(bits & ~(1u << j))", "bits"),
        ("the bits after the last element change", "j < n && j < 8", "j < 8"),
        ("a tie was always rounded up", "(low == 0x8000 && tie)", "low == 0x8000"),
        ("a parameter is not its narrow master", "if (kind->master_format == OC_BFLOAT16)", "if (0)"),
    ),
    *mutants(
        "kernels_simd.h",
        VECTOR_SETS,
        (
            "update does nothing",
            "for (int64_t i = begin; i < end; i += LANES) {",
            "for (int64_t i = end; i < end; i += LANES) {",
        ),
        ("main loop stores no master", "v_store((float *)s.master + i, p);", ";"),
        (
            "main loop does not keep states",
            "if (!keep_states) {",
            "if (1) {",
        ),
        ("tail stores no states", "if (!kind->keep_states) {", "if (0) {"),
        ("tail skipped", "if (whole < end)", "if (0)"),
        ("tail stores no moments", "from_lanes(moments + k, a->moments[k], OC_FLOAT32, begin, n);", ";"),
        ("gradient scale dropped", "g = v_mul(g, c->grad_scale);", ";"),
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
        "rule_adam.h",
        VECTOR_SETS,
        ("torch: betas swapped", "v_mul(v, k[ADAM_BETA2]))", "v_mul(v, k[ADAM_BETA1]))"),
        ("optax: betas swapped", "v_mul(k[ADAM_BETA1], m)", "v_mul(k[ADAM_BETA2], m)"),
        ("torch: no weight decay", "p = v_mul(p, k[ADAM_DECAY]);", ";"),
        ("torch: no L2", "g = v_fma(p, k[ADAM_L2], g);", ";"),
        ("optax: no weight decay", "update = v_add(update, v_mul(k[ADAM_WEIGHT_DECAY], p));", ";"),
        ("optax: no L2", "g = v_add(g, v_mul(k[ADAM_L2], p));", ";"),
        (
            "torch's tail form",
            "v_fma(v_mul(k[ADAM_ONE_MINUS_BETA2], g), g, v_mul(v, k[ADAM_BETA2]))",
            "v_fma(v, k[ADAM_BETA2], v_mul(v_mul(k[ADAM_ONE_MINUS_BETA2], g), g))",
        ),
    ),
    *mutants(
        "rule_sgd.h",
        VECTOR_SETS,
        (
            "weight decay is two roundings",
            "v_fma(p, k[SGD_WEIGHT_DECAY], g)",
            "v_add(g, v_mul(k[SGD_WEIGHT_DECAY], p))",
        ),
        ("optax: no weight decay", ": v_add(g, v_mul(k[SGD_WEIGHT_DECAY], p));", ": g;"),
        ("the first gradient is damped", "if (c->on[SGD_IS_FIRST])", "if (0)"),
        (
            "the other product is rounded",
            "v_fma(g, k[SGD_ONE_MINUS_DAMPENING], v_mul(*m, k[SGD_MOMENTUM]))",
            "v_fma(*m, k[SGD_MOMENTUM], v_mul(g, k[SGD_ONE_MINUS_DAMPENING]))",
        ),
        ("optax: no momentum", "*m = v_add(g, v_mul(k[SGD_MOMENTUM], *m));", "*m = g;"),
        ("Nesterov's momentum is plain", "if (!c->on[SGD_IS_NESTEROV])", "if (1)"),
        (
            "Nesterov's FMA is two roundings",
            "v_fma(*m, k[SGD_MOMENTUM], g)",
            "v_add(g, v_mul(*m, k[SGD_MOMENTUM]))",
        ),
        (
            "the step is two roundings",
            "v_fma(direction, c->values[SGD_LR], p)",
            "v_add(p, v_mul(direction, c->values[SGD_LR]))",
        ),
    ),
    *mutants(
        "rule_lion.h",
        VECTOR_SETS,
        ("the momentum's parts are swapped", "v_mul(k[LION_BETA1], *m)", "v_mul(k[LION_BETA2], *m)"),
        ("the step has a size", "return v_sign(mixed);", "return mixed;"),
        ("zero has a step", "v_pick(v_equal(v_twice32(bits), v_bits_zero()), bits, one)", "one"),
        ("no weight decay", "step = v_add(step, v_mul(c->values[LION_WEIGHT_DECAY], p));", ";"),
    ),
    *mutants(
        "rule_adagrad.h",
        VECTOR_SETS,
        ("weight decay is two roundings", "v_fma(p, decay, g)", "v_add(g, v_mul(decay, p))"),
        ("optax: no weight decay", ": v_add(g, v_mul(decay, p));", ": g;"),
        ("the square is rounded", "v_fma(g, g, *sum)", "v_add(v_mul(g, g), *sum)"),
        ("eps is under the root", "v_add(v_sqrt(*sum), eps)", "v_sqrt(v_add(*sum, eps))"),
        ("optax: eps is beside the root", "v_sqrt(v_add(*sum, eps))", "v_add(v_sqrt(*sum), eps)"),
        (
            "optax: zero is no sum",
            "inverse = v_of_bits(v_pick(is_zero, v_bits_zero(), v_bits_of(inverse)));",
            "(void)is_zero;",
        ),
    ),
    *mutants(
        "rule_muon.h",
        VECTOR_SETS,
        ("the momentum has one form", "c->on[MUON_GRADIENT_IS_SMALL] ? *m : g", "*m"),
        ("the direction has one form", "c->on[MUON_MOMENTUM_IS_SMALL] ? g : *m", "*m"),
        ("Nesterov's direction is plain", "if (!c->on[MUON_IS_NESTEROV])", "if (1)"),
        ("no decay", "v_mul(p, k[MUON_DECAY])", "p"),
        ("optax: the step is the parameter", "c->on[MUON_IS_SUM] ? v_add(p, step) : step", "step"),
        (
            "the step is two roundings",
            "v_fma(m[1], k[MUON_STEP_SIZE], v_mul(p, k[MUON_DECAY]))",
            "v_add(v_mul(m[1], k[MUON_STEP_SIZE]), v_mul(p, k[MUON_DECAY]))",
        ),
    ),
    *mutants(
        "rules.h",
        INSTRUCTION_SETS,
        ("a moment has the other's sign", "return (SIGNS) >> moment & 1;", "return !((SIGNS) >> moment & 1);"),
        ("SGD without momentum has a moment", "values[which] >= 0x1p-1022 ?", "1 ?"),
    ),
    *mutants(
        "kernels_formats.h",
        VECTOR_SETS,
        ("a run in two blocks has one key", "source->next_key, 0,", "source->key, 0,"),
        ("a run's first of two blocks is not counted on", "source->key, source->number,", "source->key, 0,"),
        ("a run's one block is not counted on", "source->key, source->number)", "source->key, 0)"),
        (
            "half of the key is not used",
            "v_bits_xor(v_bits_xor(x, v_bits_right(x, 15)), s->upper)",
            "v_bits_xor(x, v_bits_right(x, 15))",
        ),
        ("vectors share random bits", "s->count = v_bits_add(s->count, v_bits_set(LANES));", ";"),
        (
            "bf16 truncates",
            "v_bits_add(whose == FOR_MASTER ? quiet(x) : v_bits_of(x), random_16(random, whose))",
            "whose == FOR_MASTER ? quiet(x) : v_bits_of(x)",
        ),
        (
            "a NaN becomes something else",
            "v_pick(v_ordered(x), v_bits_of(x), v_bits_set(0x7fc00000))",
            "v_bits_of(x)",
        ),
        (
            "bf16 moments have the same random bits",
            "default: return v_bits_right(bits, 16);",
            "default: return v_bits_and(bits, v_bits_set(0xffff));",
        ),
        (
            "8-bit moments have the same random bits",
            ": v_bits_right(r, 32 - OC_DROPPED);",
            ": v_bits_and(r, v_bits_set((1 << OC_DROPPED) - 1));",
        ),
        ("8 bits truncate", "v_bits_sub(v_bits_add(exact, r), offset)", "v_bits_sub(exact, offset)"),
        (
            "8 bits lose small values",
            "vbits exact = v_max32(bits,",
            "vbits exact = v_max32(half_least,",
        ),
        (
            "8 bits lose the sign",
            "has_sign ? v_bits_or(v_bits_and(bits, v_bits_set(0x80000000)), offset) : offset",
            "offset",
        ),
        ("NaNs are not looked for", "if (largest > 0x7f800000)", "if (0)"),
        ("a pair takes another's moments", "i - LANES, second_before)", "i - LANES, first_before)"),
        (
            "small codes stand for large values",
            "v_min32(value, v_bits_of(",
            "v_max32(value, v_bits_of(",
        ),
        ("decoding forgets the half", "return v_add(half, half);", "return half;"),
        ("a block with inf is not NaN", "if (biased == OC_NAN_SCALE) {\n        const", "if (0) {\n        const"),
        (
            "padding has a part in the scale",
            "memset(&pad, 0, sizeof pad);",
            "memset(&pad, 0x60, sizeof pad);",
        ),
        ("a tie was always rounded up", "v_pick(down, v_bits_add(sum, v_bits_set(0x10000)), sum)", "sum"),
        ("a tie is not noted", "odd_tie = v_bits_set(0x18000)", "odd_tie = v_bits_set(0x28000)"),
        ("the bits after the last element change", "ours = (uint8_t)((1 << bits) - 1)", "ours = 255"),
        ("fp32 moments are not kept", "keep || is_narrow ?", "is_narrow ?"),
        ("narrow moments are not kept", "if (!keep && has_moment(c, types.rule, 0))", "if (1)"),
        ("narrow second moments are not kept", "if (!keep && has_moment(c, types.rule, 1))", "if (1)"),
    ),
    *mutants(
        "formats.h",
        INSTRUCTION_SETS,
        ("updates share random bits", "seed + update * golden", "seed"),
        ("parameters share random bits", "oc_mix(seed + update * golden)", "oc_mix(update * golden)"),
        ("blocks share random bits", " + block * golden", ""),
        ("no room to round up the largest", "OC_TOP_SIGNED = 14", "OC_TOP_SIGNED = 15"),
        ("one exponent less", "OC_TOP_UNSIGNED = 30", "OC_TOP_UNSIGNED = 29"),
    ),
    *mutants(
        "sum_squares.h",
        INSTRUCTION_SETS,
        ("norm misses the top digit", "digits[OC_DIGIT(at + 2)] += value >> 32 >> (32 - shift);", ";"),
        ("norm takes subnormals for normal", "(biased ? 0x800000 : 0)", "0x800000"),
    ),
    *mutants(
        "kernels_avx2.c",
        tuple({"avx2"} & set(INSTRUCTION_SETS)),
        ("decoding loses the sign", "_mm_set1_epi16((short)0xbfff)", "_mm_set1_epi16((short)0x3fff)"),
        ("fp16 truncates", "_MM_FROUND_TO_NEAREST_INT", "_MM_FROUND_TO_ZERO"),
        ("bf16 truncates", "_mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))", "_mm256_setzero_si256()"),
    ),
    *mutants(
        "kernels_avx512.c",
        tuple({"avx512"} & set(INSTRUCTION_SETS)),
        ("decoding loses the sign", "_mm256_set1_epi16((short)0xbfff)", "_mm256_set1_epi16((short)0x3fff)"),
        ("fp16 truncates", "_MM_FROUND_TO_NEAREST_INT", "_MM_FROUND_TO_ZERO"),
        ("bf16 truncates", "_mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))", "_mm512_setzero_si512()"),
    ),
    *mutants(
        "kernels_neon.c",
        tuple({"neon"} & set(INSTRUCTION_SETS)),
        ("decoding loses the sign", "vdup_n_u16(0xbfff)", "vdup_n_u16(0x3fff)"),
        ("bf16 truncates", "vaddq_u32(odd, vdupq_n_u32(0x7fff))", "vdupq_n_u32(0)"),
    ),
]

# How many mutants each source has; a row that is lost or dropped with a renamed file shows here.
COUNTS = {
    "kernels_scalar.c": 3,
    "arithmetic.h": 51,
    "kernels_simd.h": 22,
    "rule_adam.h": 7,
    "rule_sgd.h": 8,
    "rule_lion.h": 4,
    "rule_adagrad.h": 6,
    "rule_muon.h": 6,
    "rules.h": 2,
    "kernels_formats.h": 24,
    "formats.h": 5,
    "sum_squares.h": 2,
    "kernels_avx2.c": 3,
    "kernels_avx512.c": 3,
    "kernels_neon.c": 2,
}


def includes(source: Path, file: str) -> bool:
    """True if a source is a file of this name or includes it."""
    text = source.read_text()
    headers = [line.split('"')[1] for line in text.splitlines() if line.startswith('#include "')]
    return source.name == file or file in headers or any(includes(source.parent / h, file) for h in headers)


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> dict[str, Path]:
    """The objects of the unmutated sources, built once, by source; beside them are the sources."""
    folder = not_inlined(tmp_path_factory.mktemp("sound"))
    return compile_objects([folder / source.name for source in KERNELS], folder, *FLAGS)


def use(objects: Iterable[Path], library: Path, monkeypatch) -> None:
    """Put a library of these in the place of the compiled module."""
    run("gcc", *COMPILE_ARGS, *FLAGS, "-shared", *objects, "-o", library, "-lm")
    ffi = FFI()
    ffi.cdef((C_SRC / "api.h").read_text())
    monkeypatch.setattr(kernels, "ffi", ffi)
    monkeypatch.setattr(kernels, "lib", ffi.dlopen(str(library)))


def check(instruction_set: str) -> None:
    """Compare all that an instruction set's kernels do with the oracles."""
    check_kernels(instruction_set)
    check_formats(instruction_set)


def test_every_source_with_kernels_has_its_mutants():
    assert dict(Counter(mutant.file for mutant in MUTANTS)) == COUNTS
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in MUTANTS}) == len(MUTANTS), "a mutant stands twice"
    assert set(COUNTS) == {path.name for path in C_SRC.glob("*.[ch]")} - {
        *("api.h", "offload_core.h", "portable.h", "target.h"),  # hold no arithmetic
        *("dispatch.c", "pool.c"),  # c_src/tests/test_kernels.c checks them
        "device.h",  # tests/kernels/test_device_text.py checks it
    }


@pytest.mark.long("compiles C")
def test_the_sound_kernels_pass(sound, tmp_path, monkeypatch):
    use(sound.values(), tmp_path / "kernels.so", monkeypatch)
    for instruction_set in INSTRUCTION_SETS:
        check(instruction_set)


def cases() -> Iterator[Any]:
    """Each mutant with each instruction set that it changes."""
    for mutant in MUTANTS:
        for name in mutant.instruction_sets:
            yield pytest.param(mutant, name, id=f"{mutant}, {name}")
        if not mutant.instruction_sets:
            skipped = pytest.mark.skip("this processor lacks the instruction set")
            yield pytest.param(mutant, "", marks=skipped, id=str(mutant))


@pytest.mark.slow
@pytest.mark.parametrize(("mutant", "instruction_set"), [*cases()])
def test_the_check_fails_on_a_mutant(mutant, instruction_set, sound, tmp_path, monkeypatch):
    shutil.copytree(sound["pool.c"].parent, tmp_path, dirs_exist_ok=True)
    text = (tmp_path / mutant.file).read_text()
    assert text.count(mutant.old) == 1, f"{mutant.file} does not hold once what this mutant replaces"
    (tmp_path / mutant.file).write_text(text.replace(mutant.old, mutant.new))
    source = tmp_path / f"kernels_{instruction_set}.c"
    assert includes(source, mutant.file)
    use((sound | {source.name: source}).values(), tmp_path / "kernels.so", monkeypatch)
    with pytest.raises(AssertionError):
        check(instruction_set)
