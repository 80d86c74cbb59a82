"""Real processes over gloo: exact against DistributedDataParallel, and what happens when a rank is lost."""

import errno
import os
import re
import signal
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

import frontends.torch.training.components as parts_module
from frontends.torch import init, wrap
from frontends.torch.ranks import private_group
from frontends.torch.ranks.collectives import TorchRanks
from frontends.torch.ranks.device import memory_of
from frontends.torch.ranks.device_ranks import DeviceRanks, device_for
from offload_core import StateError
from offload_core.ranks import consistency
from offload_core.ranks.consistency import FORMAT, VERSION
from tests.support.interrupts import interrupt_at, numbers_of
from tests.support.processes import ROOT, environment_of, free_port, on_ranks, torch_server
from tests.support.torch_rank import batch, bits, give_up, loss_of, make, said_by, train, whole_bits


def ddp_and_fused_adamw():
    ddp = nn.parallel.DistributedDataParallel(make())
    return ddp, torch.optim.AdamW(ddp.parameters(), lr=1e-2, fused=True)


@pytest.mark.long("several trainings on two ranks or more")
@pytest.mark.quick
def test_two_ranks_equal_ddp_with_fused_adamw_bit_for_bit():
    @on_ranks(2)
    def found(rank):
        engine = wrap(make(seed=rank), lr=1e-2, reduce_bucket_size=3000)  # rank 0's values are taken
        ddp, optimizer = ddp_and_fused_adamw()
        for seed in range(20):
            train(engine, rank, [seed])
            loss_of(ddp, seed, rank).backward()
            optimizer.step()
            optimizer.zero_grad()
        return bits(engine.module), bits(ddp.module)

    assert len({each for of_one in found for each in of_one}) == 1


def test_four_ranks_agree_and_so_do_the_stages(drawn):
    streamed = {"stage": 3, "offload_param": "cpu", "param_persistence_threshold": 20}
    cases = [(clipping, early, fields) for clipping, early in ((0.05, False), (None, False), (None, True))
             for fields in ({"stage": 1}, {"stage": 2}, streamed)]  # fmt: skip
    first = {clipping: (clipping, False, {"stage": 1}) for clipping in (0.05, None)}
    others = drawn([case for case in cases if case not in first.values()], 1)

    @on_ranks(4)
    def found(rank):
        result = {}
        for clipping in {clipping for clipping, _, _ in others}:
            same = [case for case in others if case[0] == clipping]
            for _, early, fields in (first[clipping], *same):
                engine = wrap(make(), lr=1e-2, param_dtype="bfloat16", gradient_clipping=clipping,
                              update_in_backward=early, gradient_accumulation_steps=2, reduce_bucket_size=1000,
                              **fields)  # fmt: skip
                norms = [report.grad_norm for report in train(engine, rank, range(6))]
                result.setdefault(clipping, []).append((whole_bits(engine), norms))
        return result

    for clipping, (expected, *_) in found[0].items():
        assert all(of_a_stage == expected for of_one in found for of_a_stage in of_one[clipping])


def test_buckets_that_stay_on_the_device_give_the_same_bits(drawn):
    """Buckets are exchanged between devices (here the CPU's own tensors) or through host memory."""
    compared = drawn(("ordered", "native"), 1)

    @on_ranks(3)
    def found(rank):
        def between_devices(device, group, config):
            return DeviceRanks(memory_of(device), TorchRanks(group), group, native=config.reduction == "native")

        result = {}
        for reduction in ("ordered", "native"):
            for parts_module.device_for in (device_for, *[between_devices] * (reduction in compared)):
                engine = wrap(make(), lr=1e-2, param_dtype="bfloat16", gradient_clipping=0.05, reduction=reduction,
                              gradient_accumulation_steps=2, reduce_bucket_size=1000)  # fmt: skip
                norms = [report.grad_norm for report in train(engine, rank, range(6))]
                kind = type(engine.optimizer.core.device).__name__
                result[kind, reduction] = bits(engine.module), norms, engine.sent_bytes
        return result

    assert found[0] == found[1] == found[2]
    host = {reduction: found[0]["HostRanks", reduction] for reduction in ("ordered", "native")}
    for reduction in compared:
        assert found[0]["DeviceRanks", reduction] == host[reduction]
    assert host["native"][0] != host["ordered"][0]  # summed in bfloat16


def test_scripted_layers_read_finished_weights():
    """Torch does not show their code."""

    @on_ranks(2)
    def _(rank):
        def losses(layer, schedule):
            torch.manual_seed(0)
            model = nn.Sequential(*(layer(nn.Linear(256, 256)) for _ in range(4)))
            engine, found = wrap(model, lr=1e-2, schedule=schedule), []
            for seed in range(4):
                generator = torch.Generator().manual_seed(10 * seed + rank)
                loss = engine(torch.randn(4, 256, generator=generator)).pow(2).mean()
                engine.backward(loss)
                engine.step()
                found.append(loss.item())
            return found

        plain = losses(lambda layer: layer, "serial")
        assert losses(torch.jit.script, "overlap") == losses(torch.jit.script, "serial") == plain


def test_an_exchange_keeps_nothing_beside_the_compiler():
    """A frame that could not be compiled leaves the compiler's own evaluation of frames in place."""

    @on_ranks(2)
    def found(rank):
        private_group._PATIENCE = float("inf")  # a rank that keeps what an exchange was given would wait for ever

        def uncompilable(weight):
            torch._dynamo.graph_break()
            return weight.sum()

        engine = wrap(make(), lr=1e-2, reduce_bucket_size=1000)
        for seed in range(3):
            train(engine, rank, [seed])
            with pytest.raises(torch._dynamo.exc.Unsupported):
                torch.compile(uncompilable, fullgraph=True, backend="eager")(engine.module[0].weight)
        engine.flush()
        return bits(engine.module)

    assert found[0] == found[1]


def test_a_narrow_communication_dtype_rounds_what_travels():
    @on_ranks(2)
    def _(rank):
        def trained(**options):
            engine = wrap(make(), lr=1e-2, **options)
            if not options:
                for p in engine.parameters():
                    p.register_hook(lambda g: g.bfloat16().float())
            train(engine, rank, range(3))
            return bits(engine.module), engine.sent_bytes

        rounded, travelling = trained(), trained(communication_dtype="bfloat16")
        assert rounded[0] == travelling[0]
        numel, steps = 7_312, 3
        assert travelling[1] == pytest.approx(steps * numel * (2 + 4) / 2, rel=0.01)
        assert rounded[1] == pytest.approx(steps * numel * (4 + 4) / 2, rel=0.01)


def test_no_sync_defers_the_reduction_to_the_boundary_as_ddp_does():
    @on_ranks(2)
    def found(rank):
        steps, sent = 4, []
        engine = wrap(make(), lr=1e-2, stage=1, gradient_accumulation_steps=steps, reduce_bucket_size=3000)
        ddp, optimizer = ddp_and_fused_adamw()
        for seed in range(3 * steps):
            last = seed % steps == steps - 1
            with nullcontext() if last else engine.no_sync():
                engine.backward(loss_of(engine, seed, rank))
            engine.step()
            sent.append(engine.sent_bytes)
            with nullcontext() if last else ddp.no_sync():
                (loss_of(ddp, seed, rank) / steps).backward()  # a power of two: exact wherever it is done
            if last:
                optimizer.step()
                optimizer.zero_grad()
        assert sent[0] == sent[2] == 0  # nothing but at the boundaries
        assert sent[3] == sent[6] > 0
        assert sent[7] == sent[10] == 2 * sent[3]
        assert sent[11] == 3 * sent[3]
        assert bits(engine.module) == bits(ddp.module)
        return bits(engine.module)

    assert found[0] == found[1]


def test_deferrals_nest_and_an_interrupt_at_any_line_leaves_none():
    @on_ranks(2)
    def found(rank):
        engine = wrap(make(), lr=1e-2, stage=1)

        with engine.no_sync():
            with engine.no_sync():
                pass
            engine.backward(loss_of(engine, 0, rank))
        assert engine.optimizer.components.grad_hooks.has_deferred

        def defer():
            with engine.no_sync():
                pass

        numbers = numbers_of(defer, "each pass")
        for number in numbers:
            interrupt_at(number, defer)
            engine.optimizer.zero_grad()
            engine.backward(loss_of(engine, number, rank))
            assert not engine.optimizer.components.grad_hooks.has_deferred, f"line {number}"
        return len(numbers)

    assert min(found) > 0


def test_deferred_gradients_join_those_that_have_left_or_are_discarded_with_them():
    @on_ranks(2)
    def found(rank):
        engine = wrap(make(), lr=1e-2, stage=1, gradient_accumulation_steps=4)
        engine.backward(loss_of(engine, 9, rank))
        with engine.no_sync():
            engine.backward(loss_of(engine, 9, rank))
        engine.optimizer.zero_grad()
        for seed in range(4):
            with engine.no_sync() if seed == 1 else nullcontext():
                engine.backward(loss_of(engine, seed, rank))
            engine.step()

        def gradients(seed, rank):
            model = make()
            loss_of(model, seed, rank).backward()
            return [p.grad for p in model.parameters()]

        by_hand = make()
        g = {(seed, r): gradients(seed, r) for seed in range(4) for r in range(2)}
        for i, p in enumerate(by_hand.parameters()):
            first = (g[0, 0][i] + g[0, 1][i]) / 2
            second = ((g[1, 0][i] + g[2, 0][i]) + (g[1, 1][i] + g[2, 1][i])) / 2
            p.grad = ((first + second) + (g[3, 0][i] + g[3, 1][i]) / 2) / 4
        torch.optim.AdamW(by_hand.parameters(), lr=1e-2, fused=True).step()
        assert bits(engine.module) == bits(by_hand)
        return bits(engine.module)

    assert found[0] == found[1]


@pytest.mark.draws(1)
@pytest.mark.parametrize("bucket", [10_000, 1])
@pytest.mark.parametrize("steps", [1, 2])
def test_a_parameter_that_one_rank_alone_uses_is_updated_on_all(steps, bucket):
    """Rank 0 uses a layer in the first micro-step of an update."""

    @on_ranks(2)
    def _(rank):
        def through(model, seed, layers):
            h = batch(seed, 0)[:, :16]
            for layer in layers:
                h = model[layer](h)
            return h.pow(2).mean()

        torch.manual_seed(0)
        ours, by_hand = (nn.ModuleList(nn.Linear(16, 16) for _ in range(3)) for _ in range(2))
        ours.load_state_dict(by_hand.state_dict())
        engine = wrap(ours, lr=1e-2, gradient_accumulation_steps=steps, reduce_bucket_size=bucket)
        optimizer = torch.optim.AdamW(by_hand.parameters(), lr=1e-2, fused=True)
        for update in range(2):
            total = [torch.zeros_like(p) for p in by_hand.parameters()]
            for micro_step in range(steps):
                seed = 10 * update + micro_step
                used = [(0, 1, 2) if r == 0 and micro_step == 0 else (0, 2) for r in range(2)]
                engine.backward(through(ours, seed, used[rank]))
                engine.step()
                by_hand.zero_grad()
                for layers in used:  # p.grad is summed in rank order; divisions by powers of two are exact
                    (through(by_hand, seed, layers) / 2 / steps).backward()
                for t, p in zip(total, by_hand.parameters(), strict=True):
                    t += 0 if p.grad is None else p.grad
            for t, p in zip(total, by_hand.parameters(), strict=True):
                p.grad = t
            optimizer.step()
        assert bits(ours) == bits(by_hand)


def test_one_rank_alone_may_ask_for_its_state_dict():
    """While parameters are still to be gathered; then all go on."""

    @on_ranks(2)
    def found(rank):
        asked, plain = (wrap(make(), lr=1e-2, schedule="delayed", delay_warmup_steps=1) for _ in range(2))
        for seed in range(4):
            for engine in (asked, plain):
                train(engine, rank, [seed])
            if rank == 0:
                asked.optimizer.state_dict()
        for engine in (asked, plain):
            engine.flush()
        return bits(asked.module), bits(plain.module)

    assert len({each for of_one in found for each in of_one}) == 1


class WithUnused(nn.Module):
    """Autograd saves the norm's weight; the last module takes no part."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(32, 16), nn.LayerNorm(16), nn.Linear(16, 8)
        self.unused = nn.Linear(16, 8)

    def forward(self, x):
        return self.last(self.norm(self.first(x)))


@pytest.mark.draws(1)
@pytest.mark.parametrize("clipping", [None, 0.05, 1e3])
def test_buckets_that_are_launched_after_backward_are_sent_early_too(clipping):
    """Buckets that are full wait for one that never is."""

    @on_ranks(2)
    def _(rank):
        def trained(early):
            engine = wrap(WithUnused(), lr=1e-2, update_in_backward=early, gradient_clipping=clipping,
                          param_dtype="bfloat16", reduce_bucket_size=64)  # fmt: skip
            train(engine, rank, range(4))
            engine.flush()
            return bits(engine.module)

        assert trained(early=True) == trained(early=False)


def test_a_nan_on_one_rank_makes_all_skip():
    @on_ranks(3)
    def _(rank):
        engine = wrap(make(), gradient_clipping=1.0)
        before = bits(engine.module)
        engine.backward(loss_of(engine, 0, rank) * (float("nan") if rank == 1 else 1.0))
        assert engine.step().skipped == "non-finite"
        assert bits(engine.module) == before


def test_a_killed_rank_is_an_error_on_the_others_and_their_parameters_are_those_of_the_last_step():
    @on_ranks(3, killed=[1])
    def _(rank):
        engine = wrap(make(), reduce_bucket_size=1000)
        train(engine, rank, [0])
        before = bits(engine.module)
        if rank == 1:
            engine.module[0].weight.register_hook(lambda g: os.kill(os.getpid(), signal.SIGKILL))
        said = said_by(lambda: train(engine, rank, [1]))
        assert re.match("CollectiveError: .*bucket.*exchange of gradients failed", said)
        assert bits(engine.module) == before


@pytest.mark.draws(1)
@pytest.mark.parametrize("delayed", [False, True])
def test_an_engine_whose_rank_was_lost_ends_released_or_not(delayed):
    @on_ranks(2, killed=[1])
    def _(rank):
        fields = {"schedule": "delayed", "delay_warmup_steps": 0} if delayed else {}
        engine = wrap(make(), lr=1e-2, **fields)
        train(engine, rank, [0])
        before = None if delayed else bits(engine.module)
        if not delayed:
            engine.release()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        engine.close()
        assert before is None or bits(engine.module) == before
        assert not engine.optimizer.is_open
        wrap(engine.module, process_group=dist.new_group([0], use_local_synchronization=True)).close()


def test_after_a_rank_was_lost_in_mid_update_what_is_half_done_is_refused():
    @on_ranks(3, killed=[1])
    def _(rank):
        engine = wrap(make(), reduce_bucket_size=1000, param_dtype="bfloat16")
        train(engine, rank, [0])
        engine.optimizer.state_dict()
        collectives = engine.optimizer.core.device.collectives
        gather = collectives.gather

        def gathering(send, received, what):
            if rank == 1 and "bucket 2" in what:
                os.kill(os.getpid(), signal.SIGKILL)
            gather(send, received, what)

        collectives.gather = gathering
        engine.backward(loss_of(engine, 1, rank))
        said = said_by(lambda: (engine.step(), engine.flush()))
        assert re.match(r"CollectiveError: .*bucket 2: gathering of parameters failed", said)
        for act in (engine.optimizer.state_dict, lambda: engine.backward(loss_of(engine, 2, rank)), engine.step):
            with pytest.raises(StateError, match=r"^the last update broke off .*last checkpoint"):
                act()


def test_a_rank_that_runs_out_of_batches_is_a_clear_timeout_on_the_others():
    @on_ranks(2)
    def _(rank):
        engine = wrap(make())
        before = bits(engine.module)
        if rank == 0:
            give_up("")
            said = said_by(lambda: train(engine, rank, [0]))
            assert "bucket 0: exchange of gradients failed" in said
            assert "did not come in the group's time" in said
            assert bits(engine.module) == before


@pytest.mark.parametrize("forks", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["as torchrun", "torchrun"])
def test_torchrun_finds_the_group_by_itself(forks, tmp_path):
    """Forks get the variables that torchrun sets."""
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "from frontends.torch import wrap\n"
        "dist.init_process_group('gloo')\n"
        "engine = wrap(torch.nn.Linear(16, 16))\n"
        "engine.backward(engine(torch.ones(2, 16)).sum())\n"
        "assert engine.step().updated\n"
        "held = sum(t.numel() for s in engine.optimizer.state.values() for k, t in s.items() if k == 'exp_avg')\n"
        "assert held < 272, held\n"
        "dist.destroy_process_group()\n"
    )
    if forks:
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
        places = [{name: str(value) for name, value in (group | {"RANK": rank, "LOCAL_RANK": rank}).items()}
                  for rank in range(2)]  # fmt: skip
        ended = torch_server().run([script], [script], environments=places)
    else:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
        ended = [subprocess.run(command, env=environment_of(ROOT), capture_output=True, text=True, timeout=240)]
    assert [done.returncode for done in ended] == [0] * len(ended), [done.stderr for done in ended]


# --- ranks that differ -------------------------------------------------------------------------------


def test_ranks_whose_models_differ_are_told_which_parameter():
    @on_ranks(2)
    def _(rank):
        said = said_by(lambda: wrap(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64 - rank))))
        assert re.match("ParameterError: .*" + ("'2.weight'" if rank else ""), said)
        said = said_by(lambda: wrap(nn.Linear(32, 64, bias=False) if rank == 0 else nn.Linear(64, 32, bias=False)))
        assert ("'weight' ([32, 64], 2048 elements" if rank else "ParameterError") in said
        layout = torch.channels_last if rank else torch.contiguous_format
        said = said_by(lambda: wrap(nn.Conv2d(4, 4, 3, bias=False).to(memory_format=layout)))
        assert ("in memory order [0, 2, 3, 1]" if rank else "ParameterError") in said


def test_settings_that_differ_are_refused_on_every_rank():
    @on_ranks(2)
    def found(rank):
        for setting, values, beside in [
            ("schedule", ("overlap", "delayed"), {}), ("delay_warmup_steps", (0, 1), {"schedule": "delayed"}),
            ("update_in_backward", (False, True), {}), ("stage", (2, 3), {"param_persistence_threshold": 100}),
            ("param_persistence_threshold", (100, 10**6), {"stage": 3}),
        ]:  # fmt: skip
            fields, from_whom = {setting: values[rank], **beside}, "from rank 0's" if rank else "on another rank"
            error = (
                f"ParameterError: {setting} is {values[rank]!r} here and differs {from_whom}; expected the same model "
                "and configuration on every rank"
            )
            assert said_by(lambda fields=fields: wrap(make(), **fields)) == error

        def built():
            with init(**fields):
                model = make()
            wrap(model, **fields)

        assert said_by(built) == error
        sizes = {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 4}
        assert wrap(make(), sizes).offload_config.gradient_accumulation_steps == 3
        said = said_by(lambda: wrap(make(), {**sizes, "gradient_accumulation_steps": 6}))
        assert "(4) * gradient_accumulation_steps (6) * ranks (2) = 48" in said
        said = said_by(lambda: wrap(make(), lr=1e-2 if rank == 0 else 1e-4))
        assert ("lr is 0.0001 here and differs from rank 0's" if rank else "ParameterError") in said
        said = said_by(lambda: wrap(make(), loss_scale=128.0 if rank == 0 else 1))
        assert ("loss_scale is 1 here" if rank else "ParameterError") in said
        may_differ = wrap(make(), pin_memory=rank == 0, num_threads=1 + rank)
        assert train(may_differ, rank, [0])[0].updated
        engine = wrap(make(), lr=1e-2)
        before = bits(engine.module)
        engine.backward(loss_of(engine, 0, rank))
        [group] = engine.optimizer.param_groups
        group["lr"] = 1e-2 if rank == 0 else 1e-4
        said = said_by(engine.step)
        assert ("ranks differ in what they update with; here: [AdamHyper(lr=0.0001" if rank else "Error: ") in said
        group["lr"] = 1e-2
        engine.optimizer.zero_grad()
        assert bits(engine.module) == before
        assert train(engine, rank, [0])[0].updated
        return bits(engine.module)

    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("name", "value", "of_rank_1"),
    [("VERSION", "9.9.9", f"9.9.9 (messages of format {FORMAT})"),
     ("FORMAT", FORMAT + 1, f"{VERSION} (messages of format {FORMAT + 1})")],
)  # fmt: skip
def test_ranks_of_different_versions_are_told_before_anything_else_that_differs(name, value, of_rank_1):
    @on_ranks(2)
    def _(rank):
        if rank:
            setattr(consistency, name, value)
        assert said_by(lambda: wrap(make(), lr=1e-2 if rank == 0 else 1e-4)) == (
            f"ConfigError: ranks run different versions: rank 0 has offload-core {VERSION} (messages of format "
            f"{FORMAT}), rank 1 has offload-core {of_rank_1}; expected one version on every rank: install the same "
            "offload-core wherever a rank runs"
        )


def test_a_disk_that_is_too_small_on_one_rank_is_an_error_on_all_that_says_why(tmp_path):
    @on_ranks(2)
    def found(rank):
        def no_room(descriptor, start, n_bytes):
            raise OSError(errno.ENOSPC, "No space left on device")

        enough = os.posix_fallocate
        if rank:
            os.posix_fallocate = no_room
        model = make()
        said = said_by(lambda: wrap(model, offload_optimizer="nvme", nvme_path=str(tmp_path), nvme_host_bytes=0))
        os.posix_fallocate = enough
        engine = wrap(model)  # the ranks are together still
        train(engine, rank, [0])
        return said, bits(model)

    (of_0, bits_0), (of_1, bits_1) = found
    assert of_1.startswith(f"DiskError: nvme_path {tmp_path}: no room for ")
    assert of_0 == of_1.replace("DiskError: ", "DiskError: memory for states failed on rank 1, and so on all: ")
    assert bits_0 == bits_1


def test_frozen_parameters_and_buffers_start_alike_and_are_unfrozen_together():
    """One that is unfrozen may have its first gradient on one rank only."""

    @on_ranks(2)
    def found(rank):
        model = make(seed=rank)
        model[2].weight.requires_grad_(False)
        model.register_buffer("mine", torch.full((3,), rank))
        model.register_buffer("empty", torch.zeros(0))
        engine = wrap(model, lr=1e-2)
        at_first = bits(engine.module)
        assert model.mine.tolist() == [0, 0, 0]
        train(engine, rank, [0])
        model[2].weight.requires_grad_(True)
        inputs = [p for p in model.parameters() if rank == 0 or p is not model[2].weight]
        engine.backward(loss_of(engine, 1, rank), inputs=inputs)
        engine.step()
        assert at_first != bits(engine.module)
        return at_first, bits(engine.module)

    assert found[0] == found[1]


@pytest.mark.draws(1)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_parameter_that_is_unfrozen_joins_a_step_that_was_announced_without_it(ranks):
    @on_ranks(ranks)
    def _(rank):
        def unfrozen(early):
            model = make()
            model[2].weight.requires_grad_(False)
            engine = wrap(model, lr=1e-2, reduce_bucket_size=1000, update_in_backward=early)
            train(engine, rank, [0])
            frozen = bits(model[2])
            model[2].weight.requires_grad_(True)
            train(engine, rank, [1, 2])
            assert bits(model[2]) != frozen
            return bits(model)

        assert unfrozen(True) == unfrozen(False)


def test_states_of_another_rank_are_refused_and_whole_ones_are_cut():
    """Whole ones are those of torch's own AdamW."""

    @on_ranks(2)
    def _(rank):
        engine, plain = wrap(make(), lr=1e-2), make()
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
        for seed in range(2):
            g = [torch.autograd.grad(loss_of(plain, seed, r), list(plain.parameters())) for r in range(2)]
            for p, a, b in zip(plain.parameters(), *g, strict=True):
                p.grad = (a + b) / 2
            optimizer.step()
            if seed == 0:
                engine.module.load_state_dict(plain.state_dict())
                engine.optimizer.load_state_dict(optimizer.state_dict())
                train(engine, rank, [1])
        assert bits(engine.module) == bits(plain)
        saved = engine.optimizer.state_dict()
        saved["partition"] = {"rank": 1 - rank, "world_size": 2}
        said = f"load_state_dict: the states of rank {1 - rank} of 2, expected those of rank"
        with pytest.raises(StateError, match=f"^{said}"):
            engine.optimizer.load_state_dict(saved)
