"""The model and the cases of the checkpoints in tests/fixtures/deepspeed/."""

import sys
import types
from contextlib import contextmanager

CASES = {
    "stage1-bf16-1": (1, 1, {"bf16": {"enabled": True}}),
    "stage2-fp16-2": (2, 2, {"fp16": {"enabled": True, "initial_scale_power": 4}}),
    "stage3-bf16-2": (3, 2, {"bf16": {"enabled": True}}),
}
"""Stage, ranks, and the rest of the configuration."""


def model():
    """A tied weight, a frozen parameter, a buffer, and sizes that the ranks do not divide."""
    import torch

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(7, 3)
            self.frozen = torch.nn.Linear(3, 5)
            self.back = torch.nn.Linear(5, 3)
            self.norm = torch.nn.LayerNorm(3)
            self.register_buffer("offset", torch.arange(3) / 3)
            self.head = torch.nn.Linear(3, 7, bias=False)
            self.head.weight = self.embedding.weight
            self.frozen.requires_grad_(False)

        def forward(self, ids):
            x = self.embedding(ids)
            x = x + self.offset.to(x.dtype)
            return self.head(self.norm(self.back(torch.tanh(self.frozen(x)))))

    torch.manual_seed(0)
    return Model()


def groups_of(made):
    trained = [p for p in made.parameters() if p.requires_grad]
    return [{"params": [p for p in trained if p.dim() > 1]}, {"params": [p for p in trained if p.dim() == 1]}]


def engine_of(**fields):
    """An engine of :func:`model` with the groups of :class:`Run`."""
    from frontends.torch import wrap

    made = model()
    return wrap(made, params=groups_of(made), **fields)


# --- files written without DeepSpeed -----------------------------------------------------------------


class Run:
    """A run of :func:`model` as DeepSpeed would have it: random weights and states of two groups, after ``updates``
    updates.

    Attributes:
        trained: fp32 weights by name; others: frozen parameters and buffers.
        states: by parameter, then by DeepSpeed's name.
    """

    def __init__(self, kinds=("exp_avg", "exp_avg_sq"), updates=5, skipped=2, **hypers):
        import torch

        made, draw = model(), torch.Generator().manual_seed(1)

        def drawn(like):
            return torch.randn(like.shape, generator=draw)

        params = {name: p for name, p in made.named_parameters() if p.requires_grad}
        self.names = [[n for n, p in params.items() if p.dim() > 1], [n for n, p in params.items() if p.dim() == 1]]
        self.trained = {name: drawn(p) for name, p in params.items()}
        self.others = {name: drawn(t) for name, t in made.state_dict().items() if name in FROZEN}
        self.states = {name: {kind: drawn(p).abs() for kind in kinds} for name, p in params.items()}
        self.updates, self.skipped = updates, skipped
        hypers = {"lr": 0.25, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.5, **hypers}
        self.groups = [hypers, {**hypers, "weight_decay": 0.0}]
        self.step = {"step": torch.tensor(float(updates))}
        self.described, self.optimizer = {}, {}
        """Further entries of the files of the model and of the optimizer."""


FROZEN = ("frozen.weight", "frozen.bias", "offset")


_SCALERS = "deepspeed.runtime.fp16.loss_scaler"
_FAKES = {}
"""Modules in place of DeepSpeed's, where it is not imported, by name. They are importable while files are written."""


def scaler(**values):
    """An object that is pickled as DeepSpeed's loss scaler is."""
    if _SCALERS in sys.modules:
        kind = sys.modules[_SCALERS].DynamicLossScaler
    else:
        for at in range(1, _SCALERS.count(".") + 2):
            name = ".".join(_SCALERS.split(".")[:at])
            _FAKES.setdefault(name, types.ModuleType(name))
        kind = vars(_FAKES[_SCALERS]).setdefault("DynamicLossScaler", type("DynamicLossScaler", (), {}))
        kind.__module__ = _SCALERS
    made = kind.__new__(kind)
    vars(made).update(values)
    return made


@contextmanager
def importable_scalers():
    """A context in which what :func:`scaler` returned can be pickled."""
    added = {name: module for name, module in _FAKES.items() if name not in sys.modules}
    sys.modules.update(added)
    try:
        yield
    finally:
        for name in added:
            del sys.modules[name]


@importable_scalers()
def write(folder, run, stage, ranks, *, tag="now", elastic=False, longest=None):
    """Write the files that DeepSpeed would; ``longest``: the most elements in a part of a group in stage 3."""
    import torch

    path = folder / tag
    path.mkdir(parents=True)
    (folder / "latest").write_text(tag)
    shapes = [{name: run.trained[name].shape for name in names} for names in run.names]
    described = {
        "module": {**run.others, **run.trained, "head.weight": run.trained["embedding.weight"]},
        "buffer_names": ["offset"],
        "shared_params": {"head.weight": "embedding.weight"},
        "param_shapes": shapes,
        "lr_scheduler": {"last_batch_iteration": run.updates - 1},
        "global_steps": run.updates + run.skipped,
        "skipped_steps": run.skipped,
        "global_samples": 99,
        "dp_world_size": ranks,
        "mp_world_size": 1,
        "ds_version": "0.19.8",
        "ds_config": {},
        **run.described,
    }
    if stage == 0:
        order = [name for names in run.names for name in names]
        state = {i: {**run.step, **run.states[name]} for i, name in enumerate(order)}
        ids = iter(range(len(order)))
        groups = [{**g, "params": [next(ids) for _ in n]} for g, n in zip(run.groups, run.names, strict=True)]
        optimizer = {"state": state, "param_groups": groups, **run.optimizer}
        described |= {"optimizer": optimizer, "shared_params": None, "param_shapes": None}
        torch.save(described, path / "mp_rank_00_model_states.pt")
        return
    if stage == 3:
        parts = [part for names in run.names for part in _cut(run, names, longest or 10**9)]
        described["param_shapes"] = [{name: run.trained[name].shape for name in part} for _, part in parts]
        described["module"] = {"offset": run.others["offset"]}
        frozen = [name for name in run.others if name != "offset"]
        described["frozen_param_shapes"] = {name: run.others[name].shape for name in frozen}
        group_of = [0 if part[0] in run.names[0] else 1 for _, part in parts]
        for rank in range(ranks):
            described["frozen_param_fragments"] = {name: _shard(run.others[name], rank, ranks) for name in frozen}
            torch.save(described, path / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
            flat = [torch.cat([_shard(run.trained[n], rank, ranks) for n in part]) for _, part in parts]
            state = {
                i: {
                    **run.step,
                    **{
                        k: torch.cat([_shard(run.states[n][k], rank, ranks) for n in part]) for k in run.states[part[0]]
                    },
                }
                for i, (_, part) in enumerate(parts)
            }
            groups = [
                {**group, "params": [i for i, of in enumerate(group_of) if of == g]}
                for g, group in enumerate(run.groups)
            ]
            held = {"fp32_flat_groups": flat, "partition_count": ranks, **run.optimizer}
            held["optimizer_state_dict"] = {"state": state, "param_groups": groups}
            _save_optimizer(path / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", held)
        return
    torch.save(described, path / "mp_rank_00_model_states.pt")
    for rank in range(ranks):
        masters = [_run(_joined(run, names, run.trained.__getitem__), rank, ranks) for names in run.names]
        state = []
        for names in run.names:
            kinds = run.states[names[0]]
            flat = {k: _run(_joined(run, names, lambda n, k=k: run.states[n][k]), rank, ranks) for k in kinds}
            state.append({**run.step, **flat})
        held = {
            "single_partition_of_fp32_groups": masters,
            "param_alignment_paddings": [[0] * len(names) for names in run.names],
            "partition_count": [ranks] * 2,
            "base_optimizer_state": state
            if elastic
            else {
                "state": dict(enumerate(state)),
                "param_groups": [{**group, "params": [g]} for g, group in enumerate(run.groups)],
            },
            **run.optimizer,
        }
        _save_optimizer(path / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", held)


def _cut(run, names, longest):
    found, numel = [], longest + 1
    for name in names:
        size = run.trained[name].numel()
        if numel + size > longest:
            found.append((None, []))
            numel = 0
        found[-1][1].append(name)
        numel += size
    return found


def _shard(tensor, rank, ranks):
    """A rank's padded part of a tensor."""
    import torch

    part = -(-tensor.numel() // ranks)
    padded = torch.cat([tensor.reshape(-1), torch.full((part * ranks - tensor.numel(),), 13.0, dtype=tensor.dtype)])
    return padded[rank * part : (rank + 1) * part].clone()


def _joined(run, names, of):
    """A group's flat tensor, padded for the ranks."""
    import torch

    return torch.cat([of(name).reshape(-1) for name in names])


def _run(flat, rank, ranks):
    """A rank's equal part of a group, padded to a multiple of twice the ranks."""
    import torch

    padded = torch.cat([flat, torch.full((-flat.numel() % (2 * ranks),), 13.0)])
    return padded.chunk(ranks)[rank].clone()


def _save_optimizer(path, held):
    import torch

    torch.save({"optimizer_state_dict": held, "ds_config": {}, "ds_version": "0.19.8"}, path)
