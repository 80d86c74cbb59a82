"""Train a GPT on the bytes of a file, on several ranks, each with a shard of parameters and states (stage 3).

torchrun --nproc-per-node 2 pretrain_torch.py TEXT OUT. The same command again goes on from the last checkpoint.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from frontends.torch import init, init_process_group, wrap
from offload_core.lr_schedules import WarmupCosineLR
from offload_core.step_log import ProgressBar, StepLog


class GPT(nn.Module):
    def __init__(self, width, layers, context):
        super().__init__()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(context, width)
        block = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        heads = max(1, width // 64)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(width, heads, 4 * width, **block) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, tokens):
        length = tokens.shape[1]
        x = self.token(tokens) + self.position.weight[:length]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=x.device, dtype=x.dtype)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x))


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("text", type=Path)
parser.add_argument("out", type=Path, help="a folder for checkpoints, the log and the weights")
parser.add_argument("--dtype", default="bfloat16", help="of parameters (default: %(default)s)")
parser.add_argument("--lr", type=float, default=3e-4, help="(default: %(default)s)")
sizes = {"width": 512, "layers": 8, "context": 256, "batch": 8, "updates": 1000, "save-every": 100}
for name, default in sizes.items():
    parser.add_argument(f"--{name}", type=int, default=default, help="(default: %(default)s)")
args = parser.parse_args()

device = init_process_group()  # this rank's: cuda:LOCAL_RANK, or the CPU
rank, world = dist.get_rank(), dist.get_world_size()
text = torch.frombuffer(bytearray(args.text.read_bytes()), dtype=torch.uint8)
config = {"stage": 3, "param_dtype": args.dtype, "gradient_clipping": 1.0, "weight_decay": 0.1}
config["lr"] = WarmupCosineLR(args.lr, args.updates, warmup_num_steps=1 + args.updates // 20, warmup_type="linear")
torch.manual_seed(0)
with device, init(config=config):  # no rank ever has the whole model
    model = GPT(args.width, args.layers, args.context)
engine = wrap(model, config)

begun = engine.load_checkpoint(args.out / "checkpoints", missing_ok=True) or {"updates": 0}
with StepLog(args.out / "steps.jsonl", ProgressBar(args.updates), engine=engine, total=args.updates) as log:
    for update in range(begun["updates"] + 1, args.updates + 1):
        draws = torch.Generator().manual_seed(update * world + rank)  # each rank has data of its own
        starts = torch.randint(len(text) - args.context, (args.batch,), generator=draws)
        windows = torch.stack([text[i : i + args.context + 1] for i in starts.tolist()]).long().to(device)
        logits = engine(windows[:, :-1]).float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        engine.backward(loss)
        log(engine.step(), loss=loss, tokens=windows[:, 1:].numel())
        if update % args.save_every == 0 or update == args.updates:
            engine.save_checkpoint(args.out / "checkpoints", extras={"updates": update}, keep=2)
engine.export_safetensors(args.out / "weights")
engine.close()
dist.destroy_process_group()
