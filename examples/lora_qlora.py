"""Train adapters on a frozen base, in 4 bits if you like: python lora_qlora.py MODEL CHATS.jsonl OUT --four-bits

Only the adapters have optimizer states. With --offload-param the base waits in host memory, block by block (stage 3).
"""

import argparse
from pathlib import Path

import torch
from chats import by_length, micro_batches, read_chats
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from frontends.torch import gathered_parameters, wrap
from offload_core.step_log import ProgressBar, StepLog

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("model", help="a folder, or a name on the Hugging Face Hub")
parser.add_argument("chats", help="a JSONL file, as for finetune.py")
parser.add_argument("out", type=Path, help="a folder for checkpoints, the log and the adapter")
parser.add_argument("--four-bits", action="store_true", help="quantise the base (QLoRA), by bitsandbytes")
parser.add_argument("--offload-param", action="store_true", help="the base waits in host memory")
parser.add_argument("--lr", type=float, default=2e-4, help="(default: %(default)s)")
for name, default in {"rank": 16, "epochs": 2, "micro-batch": 4, "accumulate": 4, "save-every": 50}.items():
    parser.add_argument(f"--{name}", type=int, default=default, help="(default: %(default)s)")
args = parser.parse_args()

device = torch.accelerator.current_accelerator() or torch.device("cpu")
four_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
base = AutoModelForCausalLM.from_pretrained(
    args.model,
    dtype=torch.bfloat16,
    device_map={"": str(device)},
    quantization_config=four_bits if args.four_bits else None,
)
base.gradient_checkpointing_enable()
base.enable_input_require_grads()  # a checkpointed block needs an input with a gradient
torch.manual_seed(0)
model = get_peft_model(base, LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules="all-linear"))
tier = {"stage": 3, "offload_param": "cpu"} if args.offload_param else {"stage": 2}
engine = wrap(model, lr=args.lr, gradient_clipping=1.0, gradient_accumulation_steps=args.accumulate, **tier)
print(engine.memory_report())

tokenizer = AutoTokenizer.from_pretrained(args.model)
chats = read_chats(args.chats, tokenizer, base.config.max_position_embeddings)
updates = by_length(chats, args.micro_batch * args.accumulate, args.epochs)
begun = engine.load_checkpoint(args.out / "checkpoints", missing_ok=True) or {"updates": 0}
with StepLog(args.out / "steps.jsonl", ProgressBar(len(updates)), engine=engine, total=len(updates)) as log:
    for n, update in enumerate(updates[begun["updates"] :], begun["updates"] + 1):
        total = 0.0
        for batch in micro_batches(update, args.micro_batch, device):
            loss = engine(**batch).loss
            engine.backward(loss, average=False)  # a sum: each loss is divided by the tokens of the whole update
            total += loss.detach()
            report = engine.step()
        log(report, loss=total, tokens=sum(len(tokens) for tokens, _ in update))
        if n % args.save_every == 0 or n == len(updates):
            engine.save_checkpoint(args.out / "checkpoints", frozen=False, extras={"updates": n}, keep=2)
with gathered_parameters([param for param in model.parameters() if param.requires_grad]):
    model.save_pretrained(args.out / "adapter")  # PEFT's, for PeftModel.from_pretrained
engine.close()
