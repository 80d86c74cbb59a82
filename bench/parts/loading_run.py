"""One run of ``bench.parts.loading``: VARIANT SETTINGS. Each phase waits for a line, and ends with a line of JSON.

Phases are the calls of a user's program, with nothing between them.
"""

import json
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

STAGE_2, STAGE_3 = "from_pretrained, wrap(stage=2)", "from_pretrained in init(), wrap(stage=3, offload_param)"
FIELDS: dict[str, dict[str, Any]] = {
    STAGE_2: {"stage": 2},
    STAGE_3: {"stage": 3, "offload_param": "cpu"},
}
LOAD, WRAP, SAVE, EXPORT = "from_pretrained", "wrap", "save_checkpoint", "export_safetensors"
PHASES = (LOAD, WRAP, SAVE, EXPORT)


def write_model(folder: Path, config: Mapping[str, Any], file_bytes: int) -> int:
    """Write a Llama in bf16, in files of so many bytes, and return its number of parameters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model = LlamaForCausalLM(LlamaConfig(**config))
    model.save_pretrained(folder, max_shard_size=file_bytes)
    return sum(p.numel() for p in model.parameters())


def main() -> None:
    variant, settings = sys.argv[1], json.loads(sys.argv[2])
    folder = Path(settings["folder"])
    if variant not in FIELDS:
        print(json.dumps({"numel": write_model(folder / "model", settings["model"], settings["file_bytes"])}))
        return
    import safetensors.torch  # noqa: F401 - libraries do not count
    import torch
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    from frontends.torch import init, wrap

    torch.set_num_threads(settings["threads"])
    fields = {**FIELDS[variant], "num_threads": settings["threads"]}
    made: dict[str, Any] = {}

    def load() -> None:
        with init(remote_device="cpu") if variant == STAGE_3 else nullcontext():
            made["model"] = LlamaForCausalLM.from_pretrained(folder / "model", dtype=torch.bfloat16)

    def put() -> None:
        made["engine"] = wrap(made.pop("model"), lr=1e-3, **fields)

    def save() -> None:
        made["engine"].save_checkpoint(folder / "saved")

    def export() -> None:
        made["engine"].export_safetensors(folder / "exported", max_shard_bytes=settings["file_bytes"])

    acts: dict[str, Callable[[], None]] = dict(zip(PHASES, (load, put, save, export), strict=True))
    for act in acts.values():
        print("{}", flush=True)  # ready
        sys.stdin.readline()
        act()
        report = made["engine"].memory_report() if "engine" in made else None
        planned = None if report is None else report.planned_host_bytes + report.planned_device_bytes
        print(json.dumps({"planned": planned}), flush=True)
        sys.stdin.readline()


if __name__ == "__main__":
    main()
