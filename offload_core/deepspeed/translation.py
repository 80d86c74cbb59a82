"""DeepSpeed configurations as fields of ``OffloadConfig``.

A configuration is first checked against ``keys.py``, key by key, and then translated section by section.
"""

import io
import math
import os
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields
from typing import Any

from ..errors import ConfigError, ConfigWarning
from ..rules import RULES
from ..support import checks
from ..support.files import read_regular
from ..support.user_line import UserLine
from .keys import AUTO, KEYS, OPTIMIZERS, OWN_CLIPPING, SCHEDULE_KEYS, VERSION, Key, spellings, walk
from .schedules import SCHEDULES, OneCycle, SectionSchedule, WarmupCosineLR, WarmupLR

_PASSED_ON = {
    "reduce_bucket_size": "reduce_bucket_size",
    "stage3_param_persistence_threshold": "param_persistence_threshold",
    "stage3_max_live_parameters": "max_live_parameters",
    "stage3_prefetch_bucket_size": "prefetch_bucket_size",
    "stage3_max_reuse_distance": "max_reuse_distance",
}
"""Keys of ``zero_optimization`` whose values are those of fields."""
_NARROW = {
    "bf16_master_weights_and_grads": ("master_dtype", "bfloat16"),
    "bf16_optimizer_states": ("state_format", "bf16"),
}
"""Keys of ``bf16`` that ask for narrow states, and the fields that do."""
_PLACES = {None: "cpu", "none": None, "cpu": "cpu", "nvme": "nvme"}
"""The values of ``offload_optimizer``, by DeepSpeed's ``offload_optimizer.device``; None: there is no such section."""
_LONGEST_FILE = 2**20
_NAMED = 5
OWN_LR = 1e-3
"""The learning rate of a configuration without an optimizer."""


# --- which kind of dict, which file ----------------------------------------------------------------


def is_deepspeed(given: Mapping[str, Any], own: Collection[str]) -> bool:
    """True if a dict is a DeepSpeed configuration, False if it is one of the fields ``own``.

    Names that both have (``gradient_clipping``, ``gradient_accumulation_steps``) mean the same in both, but for
    ``optimizer``, which is a section there and a name here.

    Raises:
        ConfigError: the dict has keys of both kinds.
    """
    known = spellings(KEYS)
    sections = {name for name, value in given.items() if isinstance(value, Mapping)}
    theirs = [name for name in given if name in known and (name not in own or name in sections)]
    named = [name for name, value in given.items() if name == "optimizer" and isinstance(value, str)]
    ours = [name for name in given if name in own and name not in known] + named
    if theirs and ours:
        raise ConfigError(
            f"config: {ours[0]!r} is a field of OffloadConfig and {theirs[0]!r} a key of DeepSpeed's configurations; "
            f"expected one kind in a dict: give fields beside it, wrap(..., config, {ours[0]}=...)"
        )
    return bool(theirs)


def optimizer_in(config: Mapping[str, Any] | str | os.PathLike[str] | None) -> Any:
    """The value of ``OffloadConfig.optimizer`` that a configuration asks for; ``MISSING``: it names none.

    Args:
        config: a mapping of fields or a DeepSpeed configuration, or the path of such a file.
    """
    given = load(config) if isinstance(config, str | os.PathLike) else config
    named = given.get("optimizer", MISSING) if isinstance(given, Mapping) else MISSING
    if not isinstance(named, Mapping):
        return named
    type = named.get("type")
    kind = OPTIMIZERS.get(type.lower()) if isinstance(type, str) else None
    return MISSING if kind is None else kind.rule


def place_of(name: str) -> str | None:
    """The path of the key of this name in a DeepSpeed configuration; None: there is none."""
    if name in spellings(KEYS):
        return name
    return next((path for path, key in walk() if name in (path.rpartition(".")[2], *key.old)), None)


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a configuration from a file as DeepSpeed does, as Hjson: JSON with comments and optional commas.

    Raises:
        ConfigError: the file is missing, cannot be read or has no keys, or has a key twice.
    """
    import hjson  # imported here, because it takes as long as the rest of the package

    if not isinstance(path, str | os.PathLike):
        raise ConfigError(f"config: got {type(path).__name__}, expected a dict, or the path of a file")
    source = os.fspath(path)
    try:
        file = io.TextIOWrapper(io.BytesIO(read_regular(path, most_bytes=_LONGEST_FILE)), encoding="utf-8-sig")
        config = hjson.load(file, object_pairs_hook=lambda pairs: _without_duplicates(source, pairs))
    except ConfigError:
        raise
    except OSError as error:
        text = " (a configuration itself is given as a dict: json.loads(text))" * source.lstrip().startswith("{")
        raise ConfigError(
            f"config: {source!r} cannot be read ({error.strerror or error}); expected the path of a DeepSpeed "
            f"configuration{text}"
        ) from error
    except Exception as error:  # hjson also raises IndexError, OverflowError (1e999) and RecursionError
        raise ConfigError(
            f"config: {source!r} cannot be read as JSON ({error}); expected a DeepSpeed configuration: {{...}}"
        ) from error
    if not isinstance(config, dict):
        raise ConfigError(f"{source}: got {type(config).__name__}, expected an object: {{...}}")
    if not config:  # a file that was never written, or cut off
        raise ConfigError(f"{source}: it has no keys; expected a DeepSpeed configuration, or no config for defaults")
    return config


def _without_duplicates(source: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    config = dict(pairs)
    if len(config) != len(pairs):
        twice = sorted(name for name, n in Counter(name for name, _ in pairs).items() if n > 1)
        some = ", ".join(map(checks.shown, twice[:_NAMED])) + ", …" * (len(twice) > _NAMED)
        raise ConfigError(f"{source}: {some} given more than once; expected each key once")
    return config


# --- translation -----------------------------------------------------------------------------------


def fields_of(
    config: Mapping[str, Any], overrides: Mapping[str, Any], *, world_size: int, source: str | None
) -> dict[str, Any]:
    """The fields of ``OffloadConfig`` that a DeepSpeed configuration sets, and ``overrides``.

    Args:
        overrides: fields that replace those of the configuration; they also give the values of its ``"auto"``. A
            number for ``lr`` becomes the highest rate of a schedule.
        world_size: the ranks that share ``train_batch_size``.
        source: the path of the configuration's file, for messages; None: it was given as a dict.

    Raises:
        ConfigError: a key is unknown or not supported, a value has the wrong type, values contradict each other, or an
            ``"auto"`` has no known value.
    """
    where = source or "DeepSpeed configuration"
    try:
        translation = _Translation(config, overrides, world_size)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    told = []
    if translation.ignored:
        told.append(f"remove the keys without effect here: {_listed(translation.ignored)}")
    if translation.differs:
        told.append(f"the run differs from that of DeepSpeed {VERSION}: {_listed(translation.differs)}")
    if told:
        UserLine.now().warn(ConfigWarning(f"{where}: {'. '.join(told)}"))
    return {**translation.fields, **overrides, **translation.schedule}


def the_one_given(config: Any, of_arguments: Any) -> dict[str, Any]:
    """The configuration that a script for DeepSpeed gives, as an argument or in its command line's arguments.

    Raises:
        ConfigError: both or neither is given, it cannot be read, it has no batch size, or its schedule is unknown.
    """
    found = [each for each in (config, of_arguments) if each is not None]
    if len(found) != 1:
        got = "a configuration both as an argument and as args.deepspeed_config" if found else "no configuration"
        raise ConfigError(f"initialize: got {got}; expected one: config=..., a dict or the path of a file")
    given = found[0] if isinstance(found[0], Mapping) else load(found[0])
    if not given.keys() & {"train_batch_size", "train_micro_batch_size_per_gpu"}:
        raise ConfigError("config: expected train_batch_size or train_micro_batch_size_per_gpu, and got neither")
    kind = (given.get("scheduler") or {}).get("type")
    if kind not in (None, *SCHEDULES):
        raise ConfigError(
            f"scheduler.type: got {checks.shown(kind)}, expected one of {', '.join(SCHEDULES)}, or a scheduler of "
            "torch as initialize(lr_scheduler=...)"
        )
    return dict(given)


def stage_of(config: Mapping[str, Any]) -> int:
    """The ZeRO stage that a DeepSpeed configuration asks for there: 0 where it says nothing."""
    section = config.get("zero_optimization") or {}
    return int(section.get("stage", 0) if isinstance(section, Mapping) else section)


def rounds_elsewhere(config: Mapping[str, Any], param_dtype: str | None, *, world_size: int) -> str | None:
    """The places in which DeepSpeed rounds sums of gradients to 16 bits, and this does not, as a sentence; None: there
    are none.

    Args:
        param_dtype: the element type of the parameters.
    """
    if param_dtype not in ("float16", "bfloat16"):
        return None
    places = ["in stage 0 (stages 1 to 3 round as here)"] if stage_of(config) == 0 else []
    places += ["over the ranks"] if world_size > 1 else []
    of_sums = (config.get("data_types") or {}).get("grad_accum_dtype")
    if config.get("gradient_accumulation_steps") not in (None, 1, AUTO) and of_sums != "fp32":
        places.append('over micro-steps (unless "data_types": {"grad_accum_dtype": "fp32"})')
    if not places:
        return None
    return (
        f"gradients in {param_dtype} are summed in fp32 here, and the run differs from that of DeepSpeed {VERSION}, "
        f"which rounds sums to {param_dtype} {' and '.join(places)}"
    )


def _listed(keys: Mapping[str, str]) -> str:
    return "; ".join(f"{name} ({why})" for name, why in keys.items())


class _Translation:
    """Translates one configuration to ``fields``."""

    def __init__(self, config: Mapping[str, Any], overrides: Mapping[str, Any], world_size: int) -> None:
        self.overrides = overrides
        self.fields: dict[str, Any] = {}
        self.schedule: dict[str, Any] = {}
        """``lr``, if it is a function."""
        self.ignored: dict[str, str] = {}
        self.differs: dict[str, str] = {}
        """Keys that have another effect here than in DeepSpeed, by path, with the effect and the setting to use."""
        self.has_betas = True
        """False: the optimizer has no betas for a schedule to cycle."""
        self.missing: dict[str, str] = {}
        """Paths of each ``"auto"`` without a known value, and the field that would give it; ``""`` if no field does."""
        given = dict(config)
        if isinstance(given.get("zero_optimization"), bool):  # from the time before stages
            given["zero_optimization"] = {"stage": int(given["zero_optimization"])}
        checked = self._checked(KEYS, given, "")
        self._batch(checked, world_size)
        self._precision(checked)
        self._zero(checked.get("zero_optimization", {}))
        lr = self._optimizer(checked.get("optimizer"))
        self._schedule(checked.get("scheduler", {}), lr)
        clipping = self._known({"gradient_clipping": OWN_CLIPPING, **checked}, "gradient_clipping", "")
        self.fields["gradient_clipping"] = clipping or None
        self.fields["average_plain_backward"] = True
        if checked.get("gradient_allreduce_op") == "sum":
            self.fields["average_over_ranks"] = False
        clips = self.overrides.get("gradient_clipping", clipping or None) is not None
        if clips and not self.overrides.get("skip_nonfinite", self.fields["skip_nonfinite"]):
            self.differs["bf16.check_grad_overflow"] = (
                "clipping skips updates whose gradient has an inf or a NaN: give gradient_clipping 0 to make them"
            )
        if self.missing:
            fields_missing = [f"{field}=..." for field in dict.fromkeys(self.missing.values()) if field]
            beside = f"; or beside it: wrap(..., {', '.join(fields_missing)})" if fields_missing else ""
            raise ConfigError(
                f"'auto' stands for values that are unknown here: {', '.join(self.missing)}; expected values in the "
                f"configuration{beside}"
            )

    def _checked(self, keys: Mapping[str, Key], given: Any, path: str) -> dict[str, Any]:
        """The values that are set, by the present names of their keys and with the types of this package."""
        if not isinstance(given, Mapping):
            raise ConfigError(f"{path.rstrip('.')}: got {checks.shown(given)}, expected an object: {{...}}")
        out: dict[str, Any] = {}
        spelt: dict[str, str] = {}
        known = spellings(keys)
        for spelling, value in given.items():
            if spelling not in known:
                elsewhere = place_of(spelling)
                hint = f"DeepSpeed has it as {elsewhere!r}" if elsewhere else checks.nearest(spelling, known)
                raise ConfigError(f"{path}{checks.named(spelling)}: unknown key; {hint}")
            name = known[spelling]
            if name in spelt:
                raise ConfigError(
                    f"{path}{spelling} and {path}{spelt[name]} are two names of one key; expected one of them"
                )
            spelt[name], key = spelling, keys[name]
            if value is None or (checks.is_in(value, (AUTO,)) and not key.auto):
                continue
            if key.keys is not None:
                out[name] = self._checked(key.keys, value, f"{path}{spelling}.")
            elif key.convert is not None:
                out[name] = AUTO if checks.is_in(value, (AUTO,)) else key.convert(f"{path}{spelling}", value)
            elif key.wants(value):
                why = key.meaning.replace("`", "")
                if key.refused:
                    raise ConfigError(f"{path}{spelling}: got {checks.shown(value)}, which is not supported: {why}")
                self.ignored[path + spelling] = why
        return out

    def _known(self, section: Mapping[str, Any], name: str, path: str) -> Any:
        """The value of a key; None if it is missing or "auto". An "auto" that no override replaces is added to
        ``missing``."""
        value = section.get(name)
        if value != AUTO:
            return value
        if name not in self.overrides:
            self.missing[path + name] = name
        return None

    def _batch(self, given: Mapping[str, Any], world_size: int) -> None:
        train, micro = given.get("train_batch_size"), given.get("train_micro_batch_size_per_gpu")
        steps = given.get("gradient_accumulation_steps")
        if "gradient_accumulation_steps" in self.overrides:
            steps = self.overrides["gradient_accumulation_steps"]
            checks.integer("gradient_accumulation_steps", steps)
        if steps == AUTO and (train is None or micro is None):
            steps = self._known(given, "gradient_accumulation_steps", "")
        elif train is not None:
            derived = steps in (None, AUTO) and micro is not None
            parts = {
                "train_micro_batch_size_per_gpu": micro,
                "gradient_accumulation_steps": None if derived else steps,
                "ranks": world_size,
            }
            product = math.prod(size or 1 for size in parts.values())
            exact = micro is not None and not derived
            if train % product or (exact and train != product):
                of = " * ".join(f"{name} ({size})" for name, size in parts.items() if size is not None)
                raise ConfigError(
                    f"train_batch_size: got {train}, expected {'' if exact else 'a multiple of '}{of} = {product}; "
                    "change one of them"
                )
            steps = train // product if derived else steps
        if steps is not None:
            self.fields["gradient_accumulation_steps"] = steps

    def _precision(self, given: Mapping[str, Any]) -> None:
        fp16, bf16 = given.get("fp16", {}), given.get("bf16", {})
        if fp16.get("enabled") is True and bf16.get("enabled") is True:
            raise ConfigError("fp16.enabled and bf16.enabled are both true; expected one of them")
        names = {"fp16.enabled": (fp16, "float16"), "bf16.enabled": (bf16, "bfloat16")}
        wanted = {path: name for path, (section, name) in names.items() if section.get("enabled") is True}
        types = given.get("data_types", {})
        if "param_dtype" in types:
            wanted["data_types.param_dtype"] = types["param_dtype"]
        if "buffer_dtype" in types:
            self.fields["buffer_dtype"] = types["buffer_dtype"]
        if len(set(wanted.values())) > 1:
            raise ConfigError(f"{' and '.join(f'{p} ({n})' for p, n in wanted.items())} differ; expected one type")
        for name in wanted.values():
            self.fields["param_dtype"] = name
        dtype = self.overrides.get("param_dtype", self.fields.get("param_dtype"))
        if fp16.get("enabled", False) and dtype in (None, "float16"):
            self._loss_scaling(fp16, sure=dtype is not None)
        self.fields["skip_nonfinite"] = True
        if bf16.get("enabled", False):
            stage = self.overrides.get("stage", given.get("zero_optimization", {}).get("stage"))
            if stage in (1, 2):
                self.fields["skip_nonfinite"] = bf16.get("check_grad_overflow", True)
            for key, (field, value) in _NARROW.items():
                if bf16.get(key, False):
                    self.fields[field] = value
                    self.differs[f"bf16.{key}"] = "rounded stochastically, not to the nearest: leave it out for fp32"
        communication = given.get("communication_data_type")
        if given.get("fp32_allreduce", False):
            if communication not in (None, "float32"):
                raise ConfigError("fp32_allreduce and communication_data_type differ; expected one of them")
            communication = "float32"
        if communication is not None:
            self.fields["communication_dtype"] = communication

    def _loss_scaling(self, fp16: Mapping[str, Any], *, sure: bool) -> None:
        scale = fp16.get("loss_scale", 0)
        if scale and not sure:  # other parameters would be scaled too
            self.missing["fp16.enabled"] = "param_dtype"
        power = fp16.get("initial_scale_power", 16)
        if power > 127:
            raise ConfigError(f"fp16.initial_scale_power: got {power}, expected at most 127")
        self.fields |= {
            "loss_scale": scale or None,
            "initial_loss_scale": 2.0**power,
            "loss_scale_window": fp16.get("loss_scale_window", 1000),
            "loss_scale_hysteresis": fp16.get("hysteresis", 2),
            "loss_scale_consecutive_hysteresis": fp16.get("consecutive_hysteresis", False),
            "min_loss_scale": fp16.get("min_loss_scale", 1),
        }

    def _zero(self, given: Mapping[str, Any]) -> None:
        if "stage" in given:
            stage = given["stage"]
            if stage > 3:
                raise ConfigError(f"zero_optimization.stage: got {stage}, expected 0, 1, 2 or 3")
            if stage == 0:
                self.ignored["zero_optimization.stage"] = "0: optimizer states are partitioned as in stage 1"
            self.fields["stage"] = max(stage, 1)
        stage = self.overrides.get("stage", self.fields.get("stage"))
        self._tiers(given, stage)
        self._pin_memory(given)
        for name, field in _PASSED_ON.items():
            if name in given and name.startswith("stage3_") and stage != 3:
                self.ignored[f"zero_optimization.{name}"] = "of stage 3 only"
            elif name in given:
                self.fields[field] = given[name]
        leaves = tuple(name for names in given.get("leaf_module", {}).values() for name in names)
        if leaves and stage != 3:
            self.ignored["zero_optimization.leaf_module"] = "of stage 3 only"
        elif leaves:
            self.fields["leaf_modules"] = leaves
        if "overlap_comm" in given:
            self.fields["schedule"] = "overlap" if given["overlap_comm"] else "serial"

    def _tiers(self, given: Mapping[str, Any], stage: Any) -> None:
        """Translate the places of states and of parameters."""
        states = self._device(given, "offload_optimizer", "cpu_offload")
        params = self._device(given, "offload_param", "cpu_offload_param")
        param_tier = self.overrides.get("offload_param", None if params == "none" else params)
        if states == "none" and param_tier is not None:
            if "offload_optimizer" not in self.overrides:
                self.ignored["zero_optimization.offload_optimizer"] = "states are on the host where parameters are"
            states = "cpu"
        taken = {
            "offload_optimizer": self.overrides.get("offload_optimizer", _PLACES[states]),
            "offload_param": param_tier,
        }
        if params in ("cpu", "nvme"):
            if stage != 3 and "offload_param" not in self.overrides:
                got = self.overrides.get("stage", given.get("stage", "left out"))
                raise ConfigError(
                    f"zero_optimization.offload_param: got {params!r} with stage {got}, expected stage 3, in which "
                    "parameters are partitioned: set it, or leave offload_param out (beside the configuration, "
                    "offload_param=None)"
                )
            if taken["offload_param"] == "nvme" and taken["offload_optimizer"] != "nvme":
                raise ConfigError(
                    "zero_optimization.offload_param.device: got 'nvme' with states in host memory: a disk keeps a "
                    "parameter and its states together; expected offload_optimizer.device 'nvme', too, or "
                    "offload_param.device 'cpu' (beside the configuration, offload_param='cpu')"
                )
            self.fields["offload_param"] = params
        if states in ("none", "nvme"):
            self.fields["offload_optimizer"] = _PLACES[states]
        self._share(given, taken)
        self._folders(given, taken)

    def _share(self, given: Mapping[str, Any], taken: Mapping[str, Any]) -> None:
        """Translate Twin-Flow's ``ratio``, the share of the parameters that the host updates.

        Args:
            taken: as in :meth:`_folders`.
        """
        ratio = given.get("offload_optimizer", {}).get("ratio", 1)
        if ratio == 1:
            return
        why = None
        if taken["offload_optimizer"] is None:
            why = "all states are on the device"
        elif taken["offload_param"] is not None:
            why = "states are on the host where parameters are"
        if why is None:
            self.fields["device_states_bytes"] = round(1.0 - ratio, 12)
        else:
            self.ignored["zero_optimization.offload_optimizer.ratio"] = why

    def _device(self, given: Mapping[str, Any], name: str, old: str) -> str | None:
        """The device in one of the two sections, or in its old spelling; None if both are missing."""
        if name in given and old in given:
            raise ConfigError(f"zero_optimization.{name} and zero_optimization.{old} mean the same; expected the first")
        if old in given:
            return "cpu" if given[old] else "none"
        return given[name].get("device", "none") if name in given else None

    def _folders(self, given: Mapping[str, Any], taken: Mapping[str, Any]) -> None:
        """Translate ``nvme_path`` of both sections, which share files here.

        Args:
            taken: the place that counts, by section.
        """
        named: dict[str, str] = {}
        for name, place in taken.items():
            path = f"zero_optimization.{name}.nvme_path"
            if "nvme_path" not in given.get(name, {}):
                continue
            if place == "nvme":
                named[path] = given[name]["nvme_path"]
            else:
                self.ignored[path] = "the device is not nvme"
        folders = tuple({os.path.normpath(folder): folder for folder in named.values()}.values())
        if "nvme_path" in self.overrides:
            pass
        elif folders:
            self.fields["nvme_path"] = folders
            if len(folders) > 1:
                self.differs[" and ".join(named)] = "states and parameters share both folders: give one for each disk"
        elif taken["offload_optimizer"] == "nvme" and "offload_optimizer" not in self.overrides:
            raise ConfigError(
                "zero_optimization.offload_optimizer.nvme_path: missing, with device 'nvme'; expected the name of a "
                "folder on a disk (or beside the configuration, nvme_path=...)"
            )

    def _pin_memory(self, given: Mapping[str, Any]) -> None:
        pinned = {
            f"{name}.pin_memory": given[name]["pin_memory"]
            for name in ("offload_optimizer", "offload_param")
            if "pin_memory" in given.get(name, {})
        }
        if "cpu_offload_use_pin_memory" in given:
            pinned["cpu_offload_use_pin_memory"] = given["cpu_offload_use_pin_memory"]
        if len(set(pinned.values())) > 1:
            raise ConfigError(f"zero_optimization: {' and '.join(pinned)} differ; expected one value for both")
        for value in pinned.values():
            self.fields["pin_memory"] = value

    def _optimizer(self, given: Mapping[str, Any] | None) -> Any:
        """Translate the optimizer. Return its learning rate, which a schedule may use: a number, "auto" or None."""
        if given is None:
            return None
        if "type" not in given:
            raise ConfigError("optimizer.type: missing; expected 'AdamW', 'Adam', 'SGD', 'Lion', 'Adagrad' or 'Muon'")
        params, kind = given.get("params", {}), OPTIMIZERS[given["type"]]
        for name in params:
            if name not in kind.params:
                raise ConfigError(f"optimizer.params.{name}: type {kind.rule!r} has {', '.join(kind.params)}")
        self.fields |= {"optimizer": kind.rule, **{name: v for name, v in kind.defaults.items() if name != "lr"}}
        self.has_betas = "betas" in RULES[kind.rule].settings
        decoupled = params.get("adam_w_mode", True)
        if given["type"] == "adamw" and not decoupled:
            raise ConfigError("optimizer.params.adam_w_mode: got False with type 'AdamW'; expected type 'Adam'")
        self.fields["adam_mode"] = "adamw" if decoupled else "adam"
        if decoupled and params.get("torch_adam", False):
            self.fields["weight_decay"] = 0.01
        special = ("lr", "weight_decay", "adam_w_mode", "torch_adam")
        self.fields |= {name: value for name, value in params.items() if name not in special}
        decay = self._known(params, "weight_decay", "optimizer.params.")
        if decay is not None:
            self.fields["weight_decay"] = decay
        lr = params.get("lr", kind.defaults["lr"])
        return self._muon(params, lr) if kind.rule == "muon" else lr

    def _muon(self, params: Mapping[str, Any], lr: Any) -> Any:
        """Translate what Muon and AdamW beside it have of their own. Return Muon's learning rate."""
        if not params.get("adam_w_mode", True):
            raise ConfigError("optimizer.params.adam_w_mode: got False with type 'Muon'; expected it left out")
        for name in ("betas", "eps", "muon_lr", "adam_lr", "ns_method", "adam_mode"):
            self.fields.pop(name, None)
        own = {name: params[name] for name in ("betas", "eps") if name in params}
        decay = {"weight_decay": self.fields["weight_decay"]} if "weight_decay" in self.fields else {}
        self.fields["adamw"] = {**own, **decay, **self._rate_of("adam_lr", params, lr)}
        if params.get("ns_method", "gram") == "gram":
            self.differs["optimizer.params.ns_method"] = (
                "'gram' iterates in float16, and here the iteration is that of torch.optim.Muon in bfloat16: give "
                "'standard'"
            )
        return params.get("muon_lr", lr)

    def _rate_of(self, name: str, params: Mapping[str, Any], lr: Any) -> dict[str, Any]:
        rate = params.get(name, lr)
        return {} if rate == AUTO else {"lr": rate}

    def _schedule(self, given: Mapping[str, Any], lr: Any) -> None:
        """Translate the schedule: ``lr``, and for some schedules ``betas``."""
        if callable(self.overrides.get("lr")):
            return
        if "lr" in self.overrides:
            lr = self.overrides["lr"]
            checks.number("lr", lr, least=0.0)
        if "type" not in given and given.get("params"):
            raise ConfigError(f"scheduler.type: missing; expected one of {', '.join(map(repr, SCHEDULES))}")
        if "type" in given:
            made = self._scheduled(given["type"], given.get("params", {}), lr)
            if made is not None:
                self.schedule["lr"] = made
                if isinstance(made.schedule, OneCycle) and made.schedule.betas is not None and self.has_betas:
                    optimizer = str(self.overrides.get("optimizer"))
                    if optimizer in RULES and "betas" not in RULES[optimizer].settings:
                        raise ConfigError(
                            f"scheduler.type: 'OneCycle' moves betas, which optimizer={optimizer!r} lacks; expected "
                            "scheduler.params.cycle_momentum=false, or another optimizer"
                        )
                    self.fields["betas"] = made.schedule.betas
        elif lr is not None:
            self.fields["lr"] = self._or_missing(lr)

    def _or_missing(self, lr: Any) -> Any:
        if lr == AUTO:
            self.missing["optimizer.params.lr"] = "lr"
        return lr

    def _scheduled(self, name: str, given: Mapping[str, Any], lr: Any) -> SectionSchedule | None:
        """The schedule of this name; None if an "auto" has no known value."""
        if name not in SCHEDULES:
            raise ConfigError(
                f"scheduler.type: got {checks.shown(name)}; {checks.nearest(name, list(SCHEDULES))}; for others leave "
                "the section out, and use torch.optim.lr_scheduler or lr=a function of the number of updates"
            )
        schedule, known, path = SCHEDULES[name], SCHEDULE_KEYS[name], "scheduler.params."
        for key in given:
            if key not in known:
                raise ConfigError(f"{path}{key}: {name} has no such key; {checks.nearest(key, known)}")
        arguments = dict(given)
        highest = "lr" if schedule is WarmupCosineLR else "warmup_max_lr"
        follows = schedule in (WarmupLR, WarmupCosineLR) and highest not in given
        if follows or given.get(highest) == AUTO:
            arguments[highest] = self._or_missing(OWN_LR if lr is None else lr)
        elif "lr" in self.overrides:
            raise ConfigError(
                f"got lr={lr!r} and scheduler.type {name!r}, which sets the learning rate by itself; expected one of "
                "them"
            )
        self.missing |= {path + key: "" for key, value in arguments.items() if value == AUTO and key != highest}
        for field in fields(schedule):
            if field.default is MISSING and field.name not in arguments:
                raise ConfigError(f"{path}{field.name}: missing; {name} needs it")
        if AUTO in arguments.values():
            return None
        try:
            return SectionSchedule(schedule(**arguments), highest if follows else None)
        except ConfigError as error:
            raise ConfigError(f"{path}{error}") from None
