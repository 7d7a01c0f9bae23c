"""GossamerStrategy of Fabric: modules in gossamer.DataParallel. A mixin; see gossamer.lightning.fabric."""

import contextlib
from typing import Any

from gossamer.data_parallel import DataParallel
from gossamer.errors import ConfigError
from gossamer.lightning import checkpoint
from gossamer.lightning.groups import backend_for, require_group
from gossamer.lightning.native import Chosen
from gossamer.lightning.reductions import all_gather_ddp_if_available, reduce


class GossamerStrategy(Chosen):
    """Trains with one of Gossamer's algorithms, on CPUs or GPUs, with one process for each device.

    fabric.setup(model, optimizer) wraps the model with all optimizers that it is given. fabric.save() adds the
    algorithm's state of all ranks to the file, and fabric.load() restores each rank's state.

    The arguments are those of Chosen.
    """

    precision_argument = "precision"
    _process_group_backend: str | None
    all_reduce = staticmethod(reduce)
    all_gather = staticmethod(all_gather_ddp_if_available)

    def _get_process_group_backend(self) -> str:
        return backend_for(self._process_group_backend, self.root_device)

    def _setup_distributed(self) -> None:
        self._backward_sync_control = SyncControl()
        asked = self._process_group_backend
        super()._setup_distributed()
        self._process_group_backend = asked  # Lightning has put its own default there
        require_group(asked, size=self.world_size, device=self.root_device)

    def setup_module_and_optimizers(self, module: Any, optimizers: list[Any], scheduler: Any = None) -> Any:
        wrapper = self._wrapped(module, optimizers)
        return wrapper, [self.setup_optimizer(each) for each in optimizers], scheduler

    def setup_module(self, module: Any) -> DataParallel:
        return self._wrapped(module, [])

    def consensus(self, model: Any) -> None:
        """Replace the weights and buffers of a model by their mean over the workers. Collective.

        Args:
            model: what fabric.setup() has returned.

        Raises:
            ConfigError: it is something else.
        """
        # Lightning has no public name for it.
        _wrapper("consensus", getattr(model, "_forward_module", model)).consensus()

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """Save a checkpoint with the states of the algorithms. Collective."""
        states = {
            name: checkpoint.gather(checkpoint.own_state(wrapper, _optimizers_in(state, wrapper)))
            for name, wrapper in _wrappers_in(state).items()
        }
        state = {**state, checkpoint.KEY: states} if states else state
        super().save_checkpoint(path, state, storage_options, filter)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint, and restore the algorithms of the models that `state` names. Collective."""
        rest: dict[str, Any] = super().load_checkpoint(path, state, strict, weights_only)
        if wrappers := _wrappers_in(state):
            saved = rest.pop(checkpoint.KEY, {})
            for name, wrapper in wrappers.items():
                checkpoint.restore(wrapper, _optimizers_in(state, wrapper), saved.get(name))
        return rest


class SyncControl:
    """Serves fabric.no_backward_sync() for a DataParallel."""

    def no_backward_sync(self, module: Any, enabled: bool) -> contextlib.AbstractContextManager[None]:
        """Let backward accumulate gradients without communication, if `enabled`."""
        if not enabled:
            return contextlib.nullcontext()
        return _wrapper("no_backward_sync", module).no_sync()


def _wrapper(where: str, module: Any) -> DataParallel:
    if not isinstance(module, DataParallel):
        raise ConfigError(
            f"{where}: needs a model that fabric.setup() has returned, got {type(module).__name__}"
        )
    return module


def _wrappers_in(state: Any) -> dict[str, DataParallel]:
    items = state.items() if isinstance(state, dict) else ()
    return {name: each for name, each in items if isinstance(each, DataParallel)}


def _optimizers_in(state: dict[str, Any], wrapper: DataParallel) -> dict[str, Any]:
    """Return the optimizers in the state that have parameters of the wrapper."""
    own = {id(param) for param in wrapper.module.parameters()}
    return {
        name: each
        for name, each in state.items()
        if hasattr(each, "param_groups")
        and any(id(param) in own for group in each.param_groups for param in group["params"])
    }
