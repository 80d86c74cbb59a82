"""Keep FSDP2's sharding of a Hugging Face model, and put the optimizer states of its shards into host memory.

torchrun --nproc-per-node 2 fsdp2.py MODEL TEXT OUT. The same command again goes on from the last checkpoint.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer

from frontends.torch import init_process_group, wrap
from offload_core.step_log import ProgressBar, StepLog

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("model", help="a folder, or a name on the Hugging Face Hub")
parser.add_argument("text", type=Path)
parser.add_argument("out", type=Path, help="a folder for checkpoints, the log and the trained model")
parser.add_argument("--lr", type=float, default=2e-5, help="(default: %(default)s)")
for name, default in {"context": 512, "batch": 4, "updates": 100, "save-every": 50}.items():
    parser.add_argument(f"--{name}", type=int, default=default, help="(default: %(default)s)")
args = parser.parse_args()

device = init_process_group()  # this rank's: cuda:LOCAL_RANK, or the CPU
rank, world = dist.get_rank(), dist.get_world_size()
tokens = AutoTokenizer.from_pretrained(args.model)(args.text.read_text(), return_tensors="pt")["input_ids"][0]
windows = tokens[: len(tokens) // args.context * args.context].view(-1, args.context)

model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for block in model.model.layers:
    fully_shard(block, mp_policy=mixed)
fully_shard(model, mp_policy=mixed)
engine = wrap(model.to(device), lr=args.lr, gradient_clipping=1.0)  # after fully_shard

begun = engine.load_checkpoint(args.out / "checkpoints", missing_ok=True) or {"updates": 0}
with StepLog(args.out / "steps.jsonl", ProgressBar(args.updates), engine=engine, total=args.updates) as log:
    for update in range(begun["updates"], args.updates):
        of_all = torch.randperm(len(windows), generator=torch.Generator().manual_seed(update))
        batch = windows[of_all[rank::world][: args.batch]].to(device)  # each rank has windows of its own
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        log(engine.step(), loss=loss, tokens=batch.numel())
        if (update + 1) % args.save_every == 0 or update + 1 == args.updates:
            engine.save_checkpoint(args.out / "checkpoints", extras={"updates": update + 1}, keep=2)
engine.export_safetensors(args.out / "model", dtype="bfloat16")  # whole weights, for from_pretrained
if rank == 0:
    model.config.save_pretrained(args.out / "model")
engine.close()
dist.destroy_process_group()
