"""Pipelines with parameters on one device, the naive unsharded loop that they must equal, and runs of both."""

import math
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from offload_core.config.options import OffloadConfig
from offload_core.device.host import HostDevice
from offload_core.device.host_ranks import HostRanks
from offload_core.dtypes import BFLOAT16, FLOAT32, ElementType
from offload_core.layout.partition import ParamSpec
from offload_core.native.grad_norm import clip_coefficient
from offload_core.rules.muon import MuonHyper
from offload_core.step.decision import StepArguments
from offload_core.step.state_access import StateAccess
from offload_core.testing.fake_device import FakeDevice, FakeTensor
from tests.support import oracles, state_formats
from tests.support.kernel_calls import State
from tests.support.locking_pipeline import LockingEngine
from tests.support.oracles import assert_same_bits
from tests.support.rules import KINDS, OPTAXS_KINDS, hyper_of, matrix_of, rule_of, updated
from tests.support.strategies import element_types

STATES = ("master", "exp_avg", "exp_avg_sq")
"""Of AdamW."""
UNANNOUNCED = "ignore:.*wait on the host for step:offload_core.HostMemoryWarning"
"""A filter of warnings, for programs that add gradients before a step is announced."""


def as_float32(values):
    """The same array if its values are in fp32, else a copy."""
    return values if values.dtype == np.float32 else values.astype(np.float32)


def held_states(pipeline, i):
    """A parameter's states as they are now, in fp32: nothing is waited for."""
    return {name: as_float32(run.values()) for name, run in StateAccess(pipeline)._local_runs(i).items()}


def overwrite(pipeline, i, value, names=STATES):
    """Give a parameter's states this value, as a front end does."""
    access = StateAccess(pipeline)
    access.will_change([i])
    for name, run in access.local_runs(i).items():
        if name in names:
            run.write(np.full(run.size, value, np.float32))


class Naive:
    """Unsharded updates by the definition: one parameter at a time, whole, in NumPy."""

    def __init__(self, masters, dtypes, groups, config, hypers, names=None):
        self.dtypes, self.groups, self.config, self.hypers = dtypes, groups, config, hypers
        self.names = names
        self.states = [
            self.kept(i, [m, *(np.full_like(m, state.first) for state in rule.states)], None)
            for i, (m, rule) in enumerate(zip(masters, self.rules, strict=True))
        ]
        self.steps = [0] * len(masters)
        self.sums = [None] * len(masters)

    @property
    def rules(self):
        return [rule_of(self.config, self.hypers[g]) for g in self.groups]

    def kept(self, i, values, update):
        """States as their formats keep them, rounded at random for this update; None: to nearest."""
        formats = self.config.state_formats(self.dtypes[i], self.rules[i])
        seed = ParamSpec(self.names[i] if self.names else f"p{i}", values[0].size, self.dtypes[i]).seed
        bits = None if update is None else state_formats.random_bits(seed, update, 0, values[0].size)
        found = []
        for state, (name, value) in enumerate(zip(self.rules[i].state_names, values, strict=True)):
            kind, has_sign = formats[name].name, formats[name].has_sign
            random = None if bits is None else state_formats.random_of(state, kind, bits)
            found.append(state_formats.decode(state_formats.encode(kind, value, has_sign=has_sign, random=random)))
        return found

    def add_gradient(self, i, gradient):
        gradient = gradient.astype(np.float32)
        self.sums[i] = gradient if self.sums[i] is None else self.sums[i] + gradient

    def step(self, divisor):
        present = [g for g in self.sums if g is not None]
        coefficient, norm = 1.0, None
        if self.config.gradient_clipping is not None:
            exact = sum(oracles.sum_of_squares(g) for g in present)
            norm = math.sqrt(exact) / divisor
            coefficient = clip_coefficient(norm, self.config.gradient_clipping)
        for i, gradient in enumerate(self.sums):
            if gradient is None:
                continue
            hyper = self.hypers[self.groups[i]]
            self.steps[i] += 1
            master, *moments = self.states[i]
            before = State(gradient, master, tuple(moments))
            after = updated(self.rules[i], hyper, before, coefficient / divisor, self.steps[i])
            self.states[i] = self.kept(i, [after.master, *after.moments], self.steps[i])
        self.sums = [None] * len(self.sums)
        return norm

    def params(self):
        return [oracles.cast(state[0], dtype) for state, dtype in zip(self.states, self.dtypes, strict=True)]


class Subject:
    """A pipeline with its parameters on one device.

    ``leaves``: the leaf modules of some of them, by number; ``hypers``: those of the groups, which say what their rules
    are; none: the configuration's.
    """

    def __init__(self, device, masters, dtypes, groups, config, scaler=None, collectives=None, leaves=(), hypers=()):
        self.device = device
        self.put = FakeTensor if isinstance(device, FakeDevice) else np.copy
        self.engine = LockingEngine(config, HostRanks(device, collectives), scaler)
        self.pipeline = self.engine.pipeline
        rules = [rule_of(config, hypers[group]) if hypers else None for group in groups]
        self.specs = [
            ParamSpec(
                f"p{i}",
                m.size,
                dtype,
                group,
                finalized_with=dict(leaves).get(i),
                rule=rule,
                matrix=matrix_of(rule, m.size),
            )
            for i, (m, dtype, group, rule) in enumerate(zip(masters, dtypes, groups, rules, strict=True))
        ]
        self.tensors = [self.put(m.astype(dtype.numpy)) for m, dtype in zip(masters, dtypes, strict=True)]
        # fp32 parameters in place start from themselves; others from the fp32 values, as wrap() does
        sources = [
            t if dtype is FLOAT32 else self.put(m) for t, dtype, m in zip(self.tensors, dtypes, masters, strict=True)
        ]
        self.pipeline.add_parameters(self.specs, sources)

    @classmethod
    def of(cls, device, case, **options):
        return cls(device, case.masters, case.dtypes, case.groups, case.config, hypers=case.hypers, **options)

    def add_gradient(self, i, gradient):
        gradient = self.put(gradient)
        self.pipeline.gradients.check(i, gradient)
        self.pipeline.gradients.add({i: gradient})

    def add_all(self, value=1.0):
        """A gradient for each parameter, of this value everywhere."""
        for i, spec in enumerate(self.specs):
            self.add_gradient(i, np.full(spec.numel, value, spec.dtype.numpy))

    def params(self):
        self.pipeline.last_step.finish()
        return [t.memory if isinstance(t, FakeTensor) else t for t in self.tensors]

    def states(self, i):
        access = StateAccess(self.pipeline)
        [(start, views)] = access.states(i)
        assert start == 0
        return [as_float32(views.get(name, self.params()[i])) for name in access.rule(i).state_names]


@dataclass(frozen=True)
class Case:
    masters: list
    dtypes: list
    groups: list
    config: OffloadConfig
    hypers: list
    steps: list
    """For each step a list of micro-steps: a list of (parameter, gradient) in order of arrival."""


formats = st.fixed_dictionaries(
    {},
    optional={
        "state_format": st.sampled_from(["fp32", "bf16", "8bit"]),
        "master_dtype": st.sampled_from([None, "bfloat16"]),
        "exp_avg_dtype": st.sampled_from([None, "float8"]),
        "exp_avg_sq_dtype": st.sampled_from([None, "bfloat16"]),
    },
)
"""Formats of states, as fields of a configuration."""


_MUONS = [MuonHyper(1e-2), MuonHyper(1e-2, weight_decay=0.0, momentum=0.4, nesterov=False)]
HYPERS = {
    "torch": [*(hyper_of(*each) for each in KINDS), *_MUONS],
    "optax": [*(hyper_of(*each) for each in OPTAXS_KINDS), *_MUONS],
}
"""Of a group, by the order of operations."""


@st.composite
def cases(draw):
    n = draw(st.integers(1, 5))
    dtypes = draw(st.lists(element_types, min_size=n, max_size=n))
    groups = draw(st.lists(st.integers(0, 1), min_size=n, max_size=n))
    sizes = draw(st.lists(st.sampled_from([1, 3, 16, 33, 200, 1027]), min_size=n, max_size=n))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    accumulation = draw(st.integers(1, 3))
    config = OffloadConfig(
        op_order=draw(st.sampled_from(["torch", "optax"])),
        adam_mode=draw(st.sampled_from(["adamw", "adam"])),
        gradient_clipping=draw(st.none() | st.sampled_from([0.5, 1e3])),
        gradient_accumulation_steps=draw(st.sampled_from([1, accumulation])),  # 1: more arrive than announced
        reduce_bucket_size=draw(st.sampled_from([1, 17, 100, 1 << 20])),
        num_threads=draw(st.integers(1, 3)),
        schedule=draw(st.sampled_from(["serial", "overlap"])),
        **draw(formats),
    )
    hypers = draw(st.lists(st.sampled_from(HYPERS[config.op_order]), min_size=2, max_size=2))
    steps = []
    for _ in range(draw(st.integers(1, 3))):
        micro = []
        for _ in range(accumulation):
            order = draw(st.permutations(range(n)))
            present = order[: draw(st.integers(1, n))]  # some parameters have no gradient
            micro.append([(i, (rng.standard_normal(sizes[i]) * 0.1).astype(dtypes[i].numpy)) for i in present])
        steps.append(micro)
    masters = [rng.standard_normal(size).astype(np.float32) for size in sizes]
    # an fp32 parameter is its own master; a low-precision one starts from the fp32 value
    return Case(masters, dtypes, groups, config, hypers, steps)


def run(subject, case):
    divisor = float(len(case.steps[0]))
    norms = []
    for micro_steps in case.steps:
        for arrivals in micro_steps:
            for i, gradient in arrivals:
                subject.add_gradient(i, gradient)
        if isinstance(subject, Naive):
            norms.append(subject.step(divisor))
        else:
            norms.append(subject.pipeline.step(StepArguments(case.hypers, subject.tensors, divisor)).grad_norm)
    return norms


def assert_equal_runs(case, subject, naive):
    assert run(subject, case) == run(naive, case)
    for i, (got, expected) in enumerate(zip(subject.params(), naive.params(), strict=True)):
        assert_same_bits(f"parameter {i}", got, expected)
        for name, mine, theirs in zip(naive.rules[i].state_names, subject.states(i), naive.states[i], strict=True):
            assert_same_bits(f"{name} of parameter {i}", mine, theirs)
        assert subject.pipeline.counts.steps[i] == naive.steps[i]


def make(device=None, dtype: ElementType = BFLOAT16, scaler=None, collectives=None, **fields):
    rng = np.random.default_rng(0)
    masters = [rng.standard_normal(n).astype(np.float32) for n in (40, 100)]
    config = OffloadConfig(**fields)
    return Subject(device or HostDevice(), masters, [dtype] * 2, [0, 0], config, scaler, collectives)


def bits(subject):
    arrays = subject.params() + [a for i in range(len(subject.specs)) for a in subject.states(i)]
    return [a.tobytes() for a in arrays] + [float(t) for t in subject.pipeline.counts.steps]


class Delayed(Naive):
    """The definition of the delayed update: from the warm-up on, gradients change the parameters one step later."""

    def __init__(self, *args):
        super().__init__(*args)
        self.seen = [state[0].copy() for state in self.states]
        self.before = [state[0].copy() for state in self.states]

    def step(self, divisor):
        done = max(self.steps)
        if all(g is None for g in self.sums):
            self.seen = [state[0].copy() for state in self.states]
            return None
        before = [state[0].copy() for state in self.states]
        norm = super().step(divisor)
        delays = done >= self.config.delay_warmup_steps
        self.seen = before if delays else [state[0].copy() for state in self.states]
        return norm

    def params(self):
        return [oracles.cast(seen, dtype) for seen, dtype in zip(self.seen, self.dtypes, strict=True)]
