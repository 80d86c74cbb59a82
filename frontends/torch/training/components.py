"""Makes and connects the components of an optimizer: the core's engine, and the classes that give torch's tensors to
it. This is the only such place, for an optimizer used alone and for the optimizer of an engine."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from offload_core.config.options import OffloadConfig
from offload_core.device.protocols import TensorMemory
from offload_core.engine import Engine, LossScaler
from offload_core.errors import ParameterError

from ..params.casting import Casts
from ..params.dtensor import check_alone, group_of, ranks_of, this_process
from ..params.slots import OwningOptimizer
from ..params.tensors import ELEMENT_TYPES
from ..ranks.device_ranks import device_for, device_of_placed
from ..stage3.construction import check_finished, check_takes_none
from ..stage3.leaf_modules import leaf_modules
from ..stage3.partitioned import PartitionedModel
from ..stage3.sharding import NoSharding, Sharding
from .device_memory import DeviceMemory
from .grad_hooks import GradHooks
from .gradient_io import TorchGradients
from .registration import NamedParam, Registration, check_new, matrices_of_frozen
from .shared_tensors import check_shared
from .state_io import TorchStates


@dataclass(frozen=True)
class Components:
    """The components of an open optimizer that hold parameters and states."""

    core: Engine
    registration: Registration
    grad_hooks: GradHooks
    states: TorchStates
    gradients: TorchGradients
    device_memory: DeviceMemory
    sharding: Sharding

    def register(
        self, named: Sequence[NamedParam], groups: Sequence[Mapping[str, Any]], model: nn.Module | None = None
    ) -> None:
        """Make states for these parameters, and take their gradients from now on.

        Args:
            groups: the optimizer's parameter groups. Each group says which update rule its parameters have.
            model: the memory plan includes the model's other tensors; None: there is no model.
        """
        config = self.core.config
        rules = [config.rule(group) for group in groups]

        def register() -> None:
            for slot in self.registration.register(named, rules, model):
                self.states.hold(slot)
                self.grad_hooks.hook(slot)

        state_lock = self.core.state_lock
        state_lock.change("the registration of parameters", register)

    def register_unfrozen(self, groups: Sequence[Mapping[str, Any]], *, with_gradient: bool = False) -> None:
        """Make states for parameters of these groups that have none and require a gradient.

        Args:
            with_gradient: True: make states for the parameters that have a gradient instead.
        """
        new = self.registration.unfrozen(groups, with_gradient=with_gradient)
        if new:
            self.registration.check_new(new)
            self.register(new, groups)

    def register_all(self, params: Iterable[torch.Tensor], groups: Sequence[Mapping[str, Any]]) -> None:
        """Make states for each of these parameters that has none."""
        new = {param for param in params if param not in self.registration.slots}
        if new:
            self.register([entry for entry in self.registration.named(groups) if entry[1] in new], groups)

    def mark_leaves(self, modules: Iterable[nn.Module], leaf: bool) -> None:
        """Make modules leaf modules. All ranks must call this.

        Args:
            leaf: False: make them ordinary modules again.

        Raises:
            StateError: gradients wait for an update.
        """
        waiting = self.grad_hooks.fresh or self.grad_hooks.has_deferred
        finalized, slots = self.sharding.mark_leaves(modules, leaf, waiting=waiting), self.registration.slots
        gradients = self.core.gradients
        gradients.defer_gradients_of([slots[param].index for param in finalized if param in slots])

    def unregister(self) -> None:
        """Remove the hooks from the parameters, and release the parameters, so that other components may register
        them."""
        self.grad_hooks.close()
        self.registration.close()

    def close(self) -> None:
        """Release the parameters, and free the states."""
        self.unregister()
        self.core.close()


@dataclass(frozen=True)
class Foundation:
    """The components of an optimizer that stay when its states are made anew.

    Attributes:
        memory: the core's device.
        casts: the element types of the model's tensors.
        sharding: the model's parameters in shards.
        device: the device of all trained parameters.
        early_copy: True if gradients are taken during backward.
        members: the ranks of torch's default group that may have elements of DTensor parameters.
    """

    core: Engine
    memory: TensorMemory
    casts: Casts
    sharding: Sharding
    device: torch.device
    early_copy: bool
    members: tuple[int, ...]

    @classmethod
    def of(
        cls,
        owner: OwningOptimizer,
        named: Sequence[NamedParam],
        groups: Sequence[Mapping[str, Any]],
        config: OffloadConfig,
        process_group: Any,
        model: nn.Module | None,
        *,
        early_copy: bool,
        scaler: LossScaler | None = None,
        casts: Casts | None = None,
    ) -> "Foundation":
        """Check all parameters of the groups, and make the components that do not depend on the parameters' states.

        Args:
            groups: the optimizer's parameter groups.
            model: the model of an engine; None: the optimizer is used alone.
            scaler: the loss scaler of a copied or unpickled optimizer. For an engine it follows from the configuration.
            casts: the element types that the parameters of a copied or unpickled optimizer got; None: the configuration
                says which.

        Raises:
            ParameterError, StateError, ConfigError: the parameters or the configuration cannot be used; nothing has
                changed.
        """
        params = [param for _, param, _ in trained(named)]
        if not params and model is None:  # an engine serves a frozen model, too
            raise ParameterError(
                "no parameter requires a gradient; expected at least one: unfreeze what is to be trained"
            )
        params = params or [param for _, param, _ in named]
        device = params[0].device
        check_finished()
        give_way = check_new(named, device, owner)
        if model is None:  # only an engine announces its steps
            config = replace(config, update_in_backward=False)
        casts = casts or Casts(config, model)
        if model is not None:
            scaler = LossScaler.of(config, [casts.of_param(param) or ELEMENT_TYPES[param.dtype] for param in params])
        ranks = ranks_of(params)
        if ranks is None:
            world = device_for(device, process_group, config)
        else:
            check_alone(params, config, process_group=process_group)
            world = device_of_placed(device, group_of(ranks), config)
        core = Engine(config, world, scaler)
        sharding: Sharding = NoSharding()
        shards_params = model is not None and config.takes_apart(core.world_size)
        if model is not None:
            check_shared(model, config, casts, shards_params=shards_params, give_way=give_way)
        if model is not None and shards_params:
            matrices = matrices_of_frozen(named, [config.rule(group) for group in groups])
            sharding = PartitionedModel(model, device, process_group, core, casts, matrices)
        else:
            if model is not None:
                leaf_modules(model, config.leaf_modules)
            others: list[tuple[str, torch.Tensor]] = [] if model is None else [*model.named_parameters()]
            check_takes_none([*(entry[:2] for entry in named), *others], config)
        own = this_process() if core.world_size == 1 else ()
        return cls(core, world.memory, casts, sharding, device, early_copy, ranks or own)

    def components(
        self,
        owner: OwningOptimizer,
        named: Sequence[NamedParam],
        groups: Sequence[Mapping[str, Any]],
        model: nn.Module | None,
    ) -> Components:
        """Make the components that depend on the parameters' states, and register these parameters as the first ones.

        Args:
            groups: the optimizer's parameter groups.
        """
        core, sharding = self.core, self.sharding
        registration = Registration(
            owner,
            core,
            self.device,
            sharding,
            self.casts,
            members=self.members,
            gradients_leave=self.early_copy,
        )
        grad_hooks = GradHooks(core, registration, early=self.early_copy)
        sharding.finalize_by(grad_hooks.finalize)
        device_memory = DeviceMemory(core, self.memory, registration, grad_hooks, sharding)
        states = TorchStates(core, registration)
        gradients = TorchGradients(core, registration, grad_hooks, states)
        components = Components(core, registration, grad_hooks, states, gradients, device_memory, sharding)
        components.register(named, groups, model)
        sharding.keep_frozen([param for _, param, _ in named])
        return components


def trained(named: Sequence[NamedParam]) -> list[NamedParam]:
    """Return the parameters that require a gradient."""
    return [entry for entry in named if entry[1].requires_grad]
