"""The names of the face: the tables of docs/deepspeed.md, made from the code itself."""

from collections import defaultdict

from frontends.torch import deepspeed
from frontends.torch.deepspeed.getters import GETTERS
from offload_core.deepspeed.names import DIFFERS, names_not_taken, refuse

PLACES = {
    "deepspeed": "<code>deepspeed.…</code>",
    "engine": "The engine",
    "zero": "<code>deepspeed.zero.…</code>",
    "utils": "<code>deepspeed.utils.…</code>",
}
_OF_AN_INSTANCE = """
    basic_optimizer collate_fn config data_parallel_group device dp_world_size eval global_rank global_samples
    global_steps local_rank lr_scheduler micro_steps module mp_world_size optimizer seq_dp_world_size skipped_steps
    train training_dataloader world_size zero_grad"""


_OF_OURS = {"set_gradient_accumulation_steps"}
"""Names of ``Engine`` alone, which the face's engine extends."""


def public(names):
    return {name for name in names if not name.startswith("_")}


def taken(place):
    """The public names of this place that the face has."""
    if place == "engine":
        return public(vars(deepspeed.DeepSpeedEngine)) - _OF_OURS | {*GETTERS, *_OF_AN_INSTANCE.split()}
    if place == "deepspeed":
        return {*deepspeed.__all__, "dist"}
    module = getattr(deepspeed, place)
    own = {name for name in public(vars(module)) if not _is_imported(module, name)}
    return own | {"dist", "logger", "zero_to_fp32"} if place == "utils" else own


def _is_imported(module, name):
    value = getattr(module, name)
    home = getattr(value, "__module__", None)
    return home is None or (home != module.__name__ and name not in getattr(module, "__all__", ()))


def table(place):
    """The rows of a place: names that are the same, names with a difference, names that are refused."""
    differs = DIFFERS[place]
    rows = ["| names | here |", "|---|---|", f"| {listed(taken(place) - differs.keys())} | the same |"]
    rows += [f"| `{name}` | {how} |" for name, how in sorted(differs.items())]
    remedies = defaultdict(set)
    for name in names_not_taken(place):
        remedies[refuse(place, name).rpartition("not taken here; ")[2]].add(name)
    return rows + [f"| {listed(names)} | refused: {why} |" for why, names in sorted(remedies.items())]


def listed(names):
    return ", ".join(f"`{name}`" for name in sorted(names))
