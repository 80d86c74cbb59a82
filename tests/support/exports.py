"""Exported weights, as their readers find them."""

import json

import safetensors
import safetensors.torch


def load(folder):
    """All tensors of an export, and the files that they are in, as its readers find them."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return safetensors.torch.load_file(folder / "model.safetensors"), {"model.safetensors"}
    assert not (folder / "model.safetensors").exists()
    weight_map = json.loads(index.read_text())["weight_map"]
    found = {}
    for name in set(weight_map.values()):
        tensors = safetensors.torch.load_file(folder / name)
        assert {tensor for tensor, file in weight_map.items() if file == name} == tensors.keys()
        found |= tensors
    assert json.loads(index.read_text())["metadata"]["total_size"] == sum(t.nbytes for t in found.values())
    return found, set(weight_map.values())
