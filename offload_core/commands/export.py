"""``python -m offload_core export CHECKPOINT FOLDER``: the weights of a checkpoint as Hugging Face's libraries read
them."""

import argparse
from pathlib import Path

from ..checkpoint.export import MAX_SHARD_BYTES, export_weights
from ..checkpoint.saved_weights import SavedWeights
from ..dtypes import BY_NAME, FLOAT32
from ..memory.host_memory import format_bytes
from ..ranks.collectives import SingleRank
from ..support import units

HELP = "write the weights of a checkpoint as safetensors; the model and the ranks that trained it are not needed"
EXAMPLE = """example: the master weights of the latest checkpoint
  python -m offload_core export checkpoints weights
rounded to bfloat16:
  python -m offload_core export checkpoints/step-00000500 weights --dtype bfloat16"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint", type=Path, help="a checkpoint, or the folder that it was saved to: the latest one"
    )
    parser.add_argument("folder", type=Path, help="the folder for model.safetensors; weights there are replaced")
    parser.add_argument("--dtype", choices=BY_NAME, default=FLOAT32.name, help="the element type (default: float32)")
    parser.add_argument(
        "--max-shard", type=units.size, metavar="SIZE", default=MAX_SHARD_BYTES, help="the most bytes in a file (5GB)"
    )


def run(args: argparse.Namespace) -> int:
    saved = SavedWeights(args.checkpoint, BY_NAME[args.dtype])
    export_weights(args.folder, saved.weights, max_shard_bytes=args.max_shard, collectives=SingleRank())
    total = format_bytes(sum(weight.n_bytes for weight in saved.weights))
    print(f"{args.folder}: {len(saved.weights)} tensors, {total}, from {saved.path}, step {saved.step}")
    if saved.left_out:
        print(f"  frozen tensors that the checkpoint does not hold, as with frozen=False: {len(saved.left_out)}")
    return 0
