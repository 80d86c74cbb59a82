"""Any sequence of calls, on a device of late and failing copies: the pipeline is what the naive loop is."""

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from offload_core.config.options import OffloadConfig
from offload_core.layout.partition import ParamSpec
from offload_core.rules.adam import AdamHyper
from offload_core.step.bucket_states import Gradient, Publication
from offload_core.step.decision import StepArguments
from offload_core.step.loss_scale import LossScaler
from offload_core.step.state_access import StateAccess
from offload_core.testing.fake_device import FakeDevice, FakeTensor
from tests.support.one_thread import Threads
from tests.support.oracles import assert_same_bits
from tests.support.pipelines import STATES, Naive, Subject, formats, held_states
from tests.support.strategies import element_types, law

SIZES = (1, 3, 16, 33, 70)
HYPERS = [AdamHyper(1e-2, (0.9, 0.99), 1e-8, 0.1)]
params = st.integers(0, 5)  # modulo their number
seeds = st.integers(0, 2**32 - 1)


class Anything(RuleBasedStateMachine):
    """Threads are played by one, so that an example that fails does so again."""

    @initialize(
        schedule=st.sampled_from(["overlap", "overlap", "serial"]),
        threads=st.none() | seeds,
        models=st.lists(st.tuples(element_types, st.sampled_from(SIZES)), min_size=1, max_size=3),
        clipping=st.sampled_from([None, 0.5, 1e3]),
        skip=st.sampled_from([None, True]),
        scale=st.none() | st.just(8.0),
        accumulation=st.integers(1, 2),
        bucket=st.sampled_from([1, 20, 1000]),
        early=st.booleans(),
        kept_in=formats,
    )
    def begin(self, schedule, threads, models, clipping, skip, scale, accumulation, bucket, early, kept_in):
        self.patch = pytest.MonkeyPatch()
        Threads(threads).play(self.patch)
        self.rng = np.random.default_rng(0)
        self.device = FakeDevice()
        self.config = OffloadConfig(
            schedule=schedule, op_order="torch", gradient_clipping=clipping, skip_nonfinite=skip, num_threads=1,
            gradient_accumulation_steps=accumulation, reduce_bucket_size=bucket,
            update_in_backward=early and bool(clipping or skip or scale),  # else much is an error
            **kept_in,
        )  # fmt: skip
        self.scalers = [LossScaler(scale, window=2) if scale else None for _ in range(2)]
        dtypes, groups = [dtype for dtype, _ in models], [0] * len(models)
        masters = [self.rng.standard_normal(size).astype(np.float32) for _, size in models]
        self.subject = Subject(self.device, masters, dtypes, groups, self.config, self.scalers[0])
        self.pipeline = self.subject.pipeline
        self.naive = Naive(masters, dtypes, groups, self.config, HYPERS)
        self.before = [[a.copy() for a in states] for states in self.naive.states]
        """The states before the last update; at first those that there are."""
        self.failing = False

    def teardown(self):
        if hasattr(self, "patch"):
            try:
                self.wait_for_all()
                self.whole_step()
            finally:
                self.patch.undo()

    # --- gradients -----------------------------------------------------------------------------------

    @rule(i=params, seed=seeds, poison=st.sampled_from([None] * 12 + [np.inf, np.nan]))
    def add_gradient(self, i, seed, poison=None):
        i %= len(self.naive.states)
        rng = np.random.default_rng(seed)
        values = (rng.standard_normal(self.subject.specs[i].numel) * 0.1).astype(self.naive.dtypes[i].numpy)
        if poison is not None:
            values[rng.integers(values.size)] = poison
        gradient = FakeTensor(np.full_like(values, np.nan))
        self.device.compute(lambda: np.copyto(gradient.memory, values))
        if self.succeeds(lambda: self.pipeline.gradients.add({i: gradient})):
            self.naive.add_gradient(i, values)

    @rule(divisor=st.sampled_from([1.0, 2.0]))
    def announce(self, divisor):
        self.succeeds(
            lambda: self.pipeline.early.expect_step(StepArguments(HYPERS, list(self.subject.tensors), divisor))
        )

    @rule(seed=seeds, announced=st.booleans())
    def add_all(self, seed, announced=True):
        if announced:
            self.announce(1.0)
        for i in reversed(range(len(self.naive.states))):
            self.add_gradient(i, seed + i)

    @rule()
    def end_micro_step(self):
        self.succeeds(self.pipeline.gradients.end_micro_step)

    @rule(which=st.none() | st.lists(params, max_size=2))
    def drop(self, which):
        dropped = range(len(self.naive.states)) if which is None else [i % len(self.naive.states) for i in which]
        if self.succeeds(lambda: self.pipeline.gradients.drop(None if which is None else dropped)):
            for i in dropped:
                self.naive.sums[i] = None

    # --- updates -------------------------------------------------------------------------------------

    @rule(divisor=st.sampled_from([1.0, 1.0, 2.0, 3.0]))
    def step(self, divisor):
        pipeline, reports, scale, scaler = self.pipeline, [], self.pipeline.loss_scale, self.scalers[1]
        examined = self.config.gradient_clipping is not None or self.config.skip_nonfinite or scaler
        gradients = [g for g in self.naive.sums if g is not None]
        finite = all(np.isfinite(g).all() for g in gradients)
        skipped = (
            None
            if gradients and (finite or not examined)
            else ("overflow" if scaler else "non-finite")
            if gradients
            else "no gradients"
        )

        def update():
            if gradients and scaler:
                scaler.update(overflow=not finite)
            if skipped:
                self.naive.sums = [None] * len(self.naive.sums)
                return None
            self.before = [[a.copy() for a in states] for states in self.naive.states]
            return self.naive.step(divisor * scale)

        step = lambda: reports.append(pipeline.step(StepArguments(HYPERS, list(self.subject.tensors), divisor)))  # noqa: E731
        if self.succeeds(step, update):
            norm, [report] = update(), reports
            assert (report.skipped, report.updated, report.loss_scale) == (skipped, not skipped, scale)
            assert norm is None or report.grad_norm == norm

    @rule()
    def wait_for_all(self):
        if self.succeeds(self.pipeline.last_step.finish):
            assert self.pipeline.updates.finished
            used = [bucket for bucket in self.pipeline.buckets.all if bucket.gradient.state is Gradient.USED]
            assert all(bucket.publication.state is Publication.EARLY for bucket in used)
            for i in range(len(self.naive.states)):
                self.compare_states(i)
            if self.succeeds(self.pipeline.early.undo):
                self.compare()

    # --- reads ---------------------------------------------------------------------------------------

    @rule(i=params)
    def read_parameter(self, i):
        i %= len(self.naive.states)
        seen = []
        if not self.succeeds(lambda: self.pipeline.parameters.await_param(i)):
            return
        self.device.compute(lambda: seen.append(self.subject.tensors[i].memory.copy())).wait()
        if not self.failing:
            assert_same_bits(f"parameter {i}", seen[0], self.naive.params()[i])

    @rule(i=params)
    def read_states(self, i):
        i %= len(self.naive.states)
        if self.succeeds(lambda: StateAccess(self.pipeline).states(i)):
            self.compare_states(i)

    # --- changes from outside --------------------------------------------------------------------------

    @precondition(lambda self: not self.failing)
    @rule(i=params, seed=seeds)
    def change(self, i, seed):
        i %= len(self.naive.states)
        self.pipeline.parameters.await_param(i)
        self.pipeline.last_step.finish()
        at = seed % self.subject.specs[i].numel
        if self.naive.params()[i][at] != 7:
            self.subject.tensors[i].memory[at] = 7
            self.naive.states[i][0][at] = 7
        StateAccess(self.pipeline).adopt(i, self.subject.tensors[i])

    @precondition(lambda self: not self.failing)
    @rule(i=params)
    def reload(self, i):
        i %= len(self.naive.states)
        self.naive.states[i][0][:] = self.naive.params()[i].astype(np.float32)
        StateAccess(self.pipeline).reload_master(i, FakeTensor(self.naive.params()[i]))

    @precondition(lambda self: not self.failing and len(self.naive.states) < 6)
    @rule(dtype=element_types, size=st.sampled_from(SIZES))
    def add_parameter(self, dtype, size):
        master = self.rng.standard_normal(size).astype(np.float32)
        self.subject.specs.append(ParamSpec(f"p{len(self.naive.states)}", size, dtype))
        self.subject.tensors.append(FakeTensor(master.astype(dtype.numpy)))
        self.pipeline.add_parameters(self.subject.specs[-1:], [FakeTensor(master)])
        self.naive.dtypes, self.naive.groups = [*self.naive.dtypes, dtype], [*self.naive.groups, 0]
        states = self.naive.kept(len(self.naive.states), [master, np.zeros_like(master), np.zeros_like(master)], None)
        self.naive.states.append(states)
        self.before.append([a.copy() for a in states])
        self.naive.steps.append(0)
        self.naive.sums.append(None)

    # --- failures --------------------------------------------------------------------------------------

    @rule(copies=st.integers(0, 8))
    def a_copy_will_fail(self, copies):
        self.device.fail_after(copies)
        self.failing = True

    def succeeds(self, call, update=None):
        """True if the call succeeds. If a copy failed, check what ``Pipeline.step`` promises, then do a whole step.

        ``update`` is what the naive loop does where the call began an update before it failed.
        """
        updating = not self.pipeline.updates.finished and not self.pipeline._announced.requested
        steps = [float(n) for n in self.pipeline.counts.steps]
        try:
            call()
        except OSError:
            assert self.failing
        else:
            return True
        if steps != [float(n) for n in self.pipeline.counts.steps]:
            update()
            updating = True
        self.device.fail_after(None)
        self.failing = False
        self.pipeline.gradients.drop()
        if not updating:
            self.pipeline.early.undo()
        self.naive.sums = [None] * len(self.naive.sums)
        self.pipeline.last_step.finish()
        self.compare_at_rest()
        if updating:
            self.compare_with_half_an_update()
        else:
            self.compare()
        self.whole_step()
        return False

    def compare_with_half_an_update(self):
        """Buckets up to one are updated, the others as they were. It is what goes on."""
        order = list(reversed(self.pipeline.arrivals.order))
        done = []
        for bucket in order:
            same = [True, True]
            for piece in bucket.layout.pieces:
                run = slice(piece.start, piece.start + piece.numel)
                mine = held_states(self.pipeline, piece.param)
                for k, theirs in enumerate((self.before, self.naive.states)):
                    pairs = zip(STATES, theirs[piece.param], strict=True)
                    same[k] &= all(np.array_equal(mine[name][run], a[run], equal_nan=True) for name, a in pairs)
            assert any(same), f"bucket {bucket.layout.index} is neither as before nor updated"
            if not all(same):
                done.append(same[1])
        assert done == sorted(done, reverse=True), "a bucket was updated after one that was not"
        for i in range(len(self.naive.states)):
            mine = held_states(self.pipeline, i)
            self.naive.states[i] = [mine[name].copy() for name in STATES]

    def whole_step(self):
        """Every parameter is published again."""
        self.drop(None)
        self.add_all(1)
        self.step(1.0)
        self.wait_for_all()
        self.compare_at_rest()

    # --- what holds --------------------------------------------------------------------------------------

    def compare(self):
        for i, expected in enumerate(self.naive.params()):
            assert_same_bits(f"parameter {i}", self.subject.tensors[i].memory, expected)
            self.compare_states(i)

    def compare_states(self, i):
        mine = held_states(self.pipeline, i)
        for name, theirs in zip(STATES, self.naive.states[i], strict=True):
            assert_same_bits(f"{name} of parameter {i}", mine[name], theirs)
        assert self.pipeline.counts.steps[i] == self.naive.steps[i]

    def compare_at_rest(self):
        buckets = self.pipeline.buckets
        assert {bucket.gradient.state for bucket in buckets.all} == {Gradient.ABSENT}
        if buckets.staging is not None:  # with all states on the device there is none
            assert len(buckets.staging._free) == buckets.terms.staging_slots


test_any_sequence_of_calls_equals_the_naive_loop = law(100, stateful_step_count=30)(Anything.TestCase)
