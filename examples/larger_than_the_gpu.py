"""Train a model that is larger than the GPU: its parameters wait in host memory, and come to the GPU block by block.

All micro-batches of an update pass one block after the other (engine.accumulate), so that each block comes twice an
update, whatever the number of micro-batches. python larger_than_the_gpu.py MODEL TEXT OUT
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from frontends.torch import init, wrap
from offload_core.step_log import ProgressBar, StepLog

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("model", help="a folder, or a name on the Hugging Face Hub")
parser.add_argument("text", type=Path)
parser.add_argument("out", type=Path, help="a folder for checkpoints, the log and the trained model")
parser.add_argument("--from-scratch", action="store_true", help="random weights, of the model's configuration")
parser.add_argument("--disk", help="a folder on a fast disk for states that host memory is too small for")
parser.add_argument("--lr", type=float, default=2e-5, help="(default: %(default)s)")
for name, default in {"context": 2048, "micro-batch": 1, "micro-batches": 16, "updates": 100, "save-every": 50}.items():
    parser.add_argument(f"--{name}", type=int, default=default, help="(default: %(default)s)")
args = parser.parse_args()

device = torch.accelerator.current_accelerator() or torch.device("cpu")
settings = {"stage": 3, "offload_param": "cpu", "param_dtype": "bfloat16", "gradient_clipping": 1.0}
settings |= {"layerwise": True, "gradient_accumulation_steps": args.micro_batches}
if args.disk is not None:
    settings |= {"offload_optimizer": "nvme", "nvme_path": args.disk}
torch.manual_seed(0)
with device, init(**settings):  # a parameter is whole while it is made, and then waits in host memory
    if args.from_scratch:
        config = AutoConfig.from_pretrained(args.model)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    else:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
model.config.use_cache = False
engine = wrap(model, lr=args.lr, **settings)
print(engine.memory_report())

tokenizer = AutoTokenizer.from_pretrained(args.model)
tokens = tokenizer(args.text.read_text(), return_tensors="pt")["input_ids"][0]
windows = tokens[: len(tokens) // args.context * args.context].view(-1, args.context)
begun = engine.load_checkpoint(args.out / "checkpoints", missing_ok=True) or {"updates": 0}
with StepLog(args.out / "steps.jsonl", ProgressBar(args.updates), engine=engine, total=args.updates) as log:
    for update in range(begun["updates"] + 1, args.updates + 1):
        draws = torch.Generator().manual_seed(update)
        drawn = torch.randint(len(windows), (args.micro_batches, args.micro_batch), generator=draws)
        batches = [{"input_ids": windows[rows].to(device), "labels": windows[rows].to(device)} for rows in drawn]
        losses = engine.accumulate(batches)  # forward and backward of all; the loss is the output's own
        log(engine.step(), loss=torch.stack(losses).mean(), tokens=drawn.numel() * args.context)
        if update % args.save_every == 0 or update == args.updates:
            engine.save_checkpoint(args.out / "checkpoints", extras={"updates": update}, keep=2)
engine.export_safetensors(args.out / "model")
model.config.save_pretrained(args.out / "model")
tokenizer.save_pretrained(args.out / "model")
engine.close()
