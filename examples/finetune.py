"""Fine-tune a Hugging Face model on chats. Run the same command again to go on after an interruption."""

import argparse
import subprocess
import sys
from pathlib import Path

import torch
from chats import by_length, micro_batches, read_chats
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, get_cosine_schedule_with_warmup

from frontends.torch import init, wrap
from offload_core.step_log import ProgressBar, StepLog

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("model", help="a folder, or a name on the Hugging Face Hub")
parser.add_argument("chats", help='a file with {"messages": [{"role": ..., "content": ...}, ...]} in each line')
parser.add_argument("out", type=Path, help="a folder for checkpoints, the log and the trained model")
parser.add_argument("--dtype", default="bfloat16", help="of parameters on the device (default: %(default)s)")
parser.add_argument("--states", default="fp32", choices=("fp32", "bf16", "8bit"), help="format of the states")
parser.add_argument("--offload-param", action="store_true", help="parameters wait in host memory (stage 3)")
parser.add_argument("--truncate", action="store_true", help="cut chats that are longer than the model takes")
rates, counts = {"lr": 2e-5, "warmup": 0.03, "held-out": 0.05}, {"epochs": 2, "micro-batch": 4, "accumulate": 8}
for name, default in {**rates, **counts, "save-every": 100}.items():
    parser.add_argument(f"--{name}", type=type(default), default=default, help="(default: %(default)s)")
args = parser.parse_args()
if args.out.is_file() or args.lr <= 0:
    parser.error(f"got out={args.out} and --lr {args.lr}; expected a folder, not a file, and a rate above 0")
export, finished = args.out / "model", f"finished: the trained model is in {args.out / 'model'}"
if any(export.glob("model*.safetensors")):
    print(f"{finished}; to train anew, name another folder than {args.out}")
    sys.exit()
config, tokenizer = AutoConfig.from_pretrained(args.model), AutoTokenizer.from_pretrained(args.model)
chats = read_chats(args.chats, tokenizer, config.max_position_embeddings, args.truncate)
n_held_out = max(1, round(args.held_out * len(chats)))  # for evaluation
held_out, chats = chats[:n_held_out], chats[n_held_out:]
updates = by_length(chats, args.micro_batch * args.accumulate, args.epochs)

device = torch.accelerator.current_accelerator() or torch.device("cpu")
settings = {"param_dtype": args.dtype, "state_format": args.states}
settings |= {"stage": 3, "offload_param": "cpu"} if args.offload_param else {"stage": 2}
config.dtype = getattr(torch, args.dtype)
config.save_pretrained(args.out)
asked = {"model": args.out, "device": device.type, **settings}
if device.type != "cpu":
    asked["device_memory"] = f"{torch.accelerator.get_memory_info(device)[0]}B"
plan = [f"--{name.replace('_', '-')}={value}" for name, value in asked.items()]
if subprocess.run([sys.executable, "-m", "offload_core", "plan", *plan]).returncode:
    sys.exit("the lines above say why this cannot be trained here; --offload-param and --states 8bit take less memory")
torch.manual_seed(0)
with device, init(**settings, enabled=args.offload_param):  # stage 3: built in shards
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto")
model.gradient_checkpointing_enable()  # backward computes activations again
settings |= {"lr": args.lr, "weight_decay": 0.0, "gradient_clipping": 1.0}
engine = wrap(model, gradient_accumulation_steps=args.accumulate, **settings)
schedule = get_cosine_schedule_with_warmup(engine.optimizer, round(args.warmup * len(updates)), len(updates))
folder, stateful = args.out / "checkpoints", {"schedule": schedule}
begun = engine.load_checkpoint(folder, stateful=stateful, missing_ok=True) or {"updates": 0}
print(f"{begun['updates']} of {len(updates)} updates done; a checkpoint every {args.save_every} and at the end")
with StepLog(args.out / "steps.jsonl", ProgressBar(len(updates)), engine=engine, total=len(updates)) as log:
    for n, update in enumerate(updates[begun["updates"] :], begun["updates"] + 1):
        values = {"loss": 0.0, "tokens": sum(len(tokens) for tokens, _ in update)}
        for batch in micro_batches(update, args.micro_batch, device):
            loss = engine(**batch).loss
            engine.backward(loss, average=False)  # a sum: each loss is divided by the tokens of the whole update
            values["loss"] += loss.detach()
            report = engine.step()
        schedule.step()
        if saves := n % args.save_every == 0 or n == len(updates):
            engine.eval()
            with torch.no_grad():
                values["eval_loss"] = sum(engine(**b).loss for b in micro_batches(held_out, args.micro_batch, device))
            engine.train()
        log(report, **values)
        if saves:
            engine.save_checkpoint(folder, stateful=stateful, extras={"updates": n}, keep=2)
for part in (tokenizer, config, model.generation_config):
    part.save_pretrained(export)
engine.export_safetensors(export)
print(finished)
