"""Memory that wrapped models really take, beside the plan."""

import ctypes
import gc
from pathlib import Path

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from bench.train.gpt_torch import GPT
from frontends.torch import wrap
from offload_core.commands.model_shapes import GPTConfig
from tests.support.held import plans

SHAPE = GPTConfig(layers=3, width=640, heads=10, vocabulary=1024, positions=None)
FIELDS = {"gradient_clipping": 1.0, "reduce_bucket_size": 4 * 2**20}
TIERS = [(1, None), (2, None), (3, None), (3, "cpu")]
CASES = {
    f"stage {stage}{', offload_param' * bool(tier)}, {dtype}": (dtype, {"stage": stage, "offload_param": tier})
    for dtype in ("float32", "bfloat16")
    for stage, tier in TIERS
}
CASES |= {
    "accumulating": ("bfloat16", {"gradient_accumulation_steps": 2}),
    "half of it frozen": ("bfloat16", {"stage": 3, "offload_param": "cpu", "frozen": 2}),
    "few are kept": (
        "bfloat16",
        {"stage": 3, "offload_param": "cpu", "max_reuse_distance": 12 * 2**20, "prefetch_bucket_size": 2 * 2**20},
    ),
    "few are whole": (
        "bfloat16",
        {"stage": 3, "offload_param": "cpu", "max_live_parameters": 8 * 2**20, "prefetch_bucket_size": 4 * 2**20},
    ),
}
EARLY = {"update_in_backward": True, "gradient_clipping": None}
CASES |= {
    f"{stage} in backward, {dtype}": (dtype, {**EARLY, **fields})
    for stage, fields in (("stage 2", {}), ("stage 3, offload_param,", {"stage": 3, "offload_param": "cpu"}))
    for dtype in ("float32", "bfloat16")
}


def status(field):
    """Kibibytes that the kernel counts of this process, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field + ":"))
    return 1024 * int(line.split()[1])


def resident():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return status("VmRSS")


class DeviceMemory:
    """The storages of a model's parameters, shards and gradients: the most at a time."""

    def __init__(self, model):
        self.model = model
        self.shards = []
        self.gradients = {}
        self.most = {"bytes": 0}
        for param in model.parameters():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(self._arrived)  # before wrap's own takes it
        for module in model.modules():
            module.register_forward_hook(lambda *_: self.sample())

    def _arrived(self, param):
        if type(param.grad) is torch.Tensor:  # not the stand-in that further micro-steps add to
            storage = param.grad.untyped_storage()
            self.gradients[StorageWeakRef(storage)] = storage.nbytes()
        self.sample()

    def sample(self):
        with torch._C.DisableTorchFunctionSubclass():
            storages = [tensor.untyped_storage() for tensor in (*self.model.parameters(), *self.shards)]
            parameters = sum({storage._cdata: storage.nbytes() for storage in storages}.values())
        self.gradients = {ref: n for ref, n in self.gradients.items() if not ref.expired()}
        gradients = sum(self.gradients.values())
        if parameters + gradients > self.most["bytes"]:
            self.most = {"bytes": parameters + gradients, "parameters": parameters, "gradients": gradients}


def measure(dtype, frozen=0, shape=SHAPE, **fields):
    before = resident()
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, dtype))
    model = GPT(shape)
    torch.set_default_dtype(torch.float32)
    for block in model.blocks[:frozen]:
        block.requires_grad_(False)
    memory = DeviceMemory(model)
    with plans() as seen:
        engine = wrap(model, lr=1e-4, **{**FIELDS, **fields})
    [plan] = seen
    if engine.optimizer.sharding.gathers and engine.offload_config.offload_param is None:
        memory.shards = engine.optimizer.components.registration.tensors()
    ids = torch.randint(0, 64, (1, 9))

    def step():
        for _ in range(engine.offload_config.gradient_accumulation_steps):
            engine.backward(engine(ids[:, :-1], ids[:, 1:]))
            assert engine.step()
        engine.flush()

    step()
    step()  # from here on it is known what is used when
    memory.most = {"bytes": 0}
    resident()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    step()
    return {
        "numel": sum(p.numel() for p in model.parameters()),
        "planned": {"host": plan.host_bytes, "device": plan.device_bytes},
        "rows": {f"{row.where} {row.what}": row.n_bytes for row in plan.rows},
        "host": engine.optimizer.core.memory.n_bytes,
        "device": memory.most,
        "process": status("VmHWM") - before,
    }


def measured(rank):
    """Each case on this rank."""
    small = GPTConfig(layers=1, width=64, heads=1, vocabulary=64, positions=None)
    for dtype in ("float32", "bfloat16"):  # the libraries' own one-time memory
        measure(dtype, shape=small, stage=3, offload_param="cpu", param_persistence_threshold=10)
    return {name: measure(dtype, **fields) for name, (dtype, fields) in CASES.items()}
