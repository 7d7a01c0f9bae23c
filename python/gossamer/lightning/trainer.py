"""What the Trainer's strategies of this face share: reductions, wrapping, checkpoints, and how a run ends.

Mixins over the DDPStrategy of either namespace, which brings launchers, ranks and process groups. No class here is used
as it is; see gossamer.lightning.pytorch.
"""

import contextlib
import logging
from typing import Any

from torch import Tensor

from gossamer.errors import ConfigError
from gossamer.lightning import checkpoint
from gossamer.lightning.batchnorm import JoinedBatchNorm
from gossamer.lightning.groups import backend_for, require_group
from gossamer.lightning.namespaces import Base
from gossamer.lightning.reductions import all_gather_ddp_if_available, reduce

_log = logging.getLogger("gossamer")


class Collective(Base):
    """reduce() and all_gather() of gossamer.lightning.distributed, and a group that is what was asked for."""

    _layer_sync: Any
    _process_group_backend: str | None
    model: Any

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """sync_ddp(); a mean of floats is in place, one of integers a new tensor. What is no tensor: itself."""
        return reduce(tensor, group, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """all_gather_ddp_if_available()."""
        gathered: Tensor = all_gather_ddp_if_available(tensor, group, sync_grads)
        return gathered

    def setup_distributed(self) -> None:
        asked = self._process_group_backend
        super().setup_distributed()
        self._process_group_backend = asked  # Lightning leaves its default there, which nobody has asked for
        require_group(asked, size=self.world_size, device=self.root_device)

    def _interrupted(self) -> bool:
        """An exception ends the run: callbacks hear of it before on_exception() does."""
        module = self.lightning_module
        return module is not None and module._trainer is not None and module.trainer.interrupted

    def setup(self, trainer: Any) -> None:
        if self.root_device.type == "cpu" and type(self._layer_sync).__name__ == "TorchSyncBatchNorm":
            self._layer_sync = JoinedBatchNorm()  # torch's works on GPUs only
        super().setup(trainer)


class Wrapping(Collective):
    """The model in a wrapper of Gossamer while it is fitted. Subclasses say which by wrap()."""

    _failed = False
    _paused = False
    _last: tuple[str, dict[str, Any]] | None = None  # this rank's state when fit() ended

    def wrap(self, model: Any) -> Any:
        """The wrapped model. Collective."""
        raise NotImplementedError

    def unwrap(self, wrapper: Any, *, crashed: bool) -> None:
        """Ends what wrap() made; crashed: without waiting for other ranks."""
        raise NotImplementedError

    @property
    def wrapper(self) -> Any:
        """What wrap() made; None outside fit()."""
        return self.model if self.model is not self.lightning_module else None

    @property
    def running(self) -> Any:
        """The gossamer.Algorithm at work in the wrapper."""
        raise NotImplementedError

    def consensus(self) -> None:
        """Replaces weights and floating-point buffers by their exact mean over the ranks. Collective, during fit().

        For algorithms whose ranks hold different weights, before a validation or at the end of training.
        """
        if self.wrapper is None:
            raise ConfigError("consensus: the model is wrapped during fit() only; call it in a hook of fit()")
        self.wrapper.consensus()

    def _get_process_group_backend(self) -> str:
        return backend_for(self._process_group_backend, self.root_device)

    def setup(self, trainer: Any) -> None:
        self._failed = self._paused = False
        self._last = None
        super().setup(trainer)

    def configure_ddp(self) -> None:
        """Nothing: algorithms need the optimizers, which are made next."""

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        self.model = self.wrap(self.model)

    # --- saving and resuming ---

    def save_checkpoint(
        self, checkpoint_: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Adds the algorithm's state of all ranks, also after fit(). Collective.

        After an exception the file goes without, and the other ranks, which may know nothing of it yet, are told: they
        must come to the barrier that follows.
        """
        if self._interrupted():
            _log.warning("gossamer: saved after an exception, without the algorithm's state: %s", filepath)
            if self.wrapper is not None:
                self.unwrap(self.wrapper, crashed=True)
            super().save_checkpoint(checkpoint_, filepath, storage_options)
            return
        with self.pause():
            if "optimizer_states" in checkpoint_ and (own := self._own_state()) is not None:
                checkpoint_ = {**checkpoint_, checkpoint.KEY: checkpoint.gather_states(own)}
            super().save_checkpoint(checkpoint_, filepath, storage_options)

    def _own_state(self) -> tuple[str, dict[str, Any]] | None:
        if self.wrapper is None:
            return self._last
        return checkpoint.own_state(self.wrapper, self.running, dict(enumerate(self.optimizers)))

    def load_optimizer_state_dict(self, checkpoint_: Any) -> None:
        super().load_optimizer_state_dict(checkpoint_)
        if self.wrapper is not None:
            saved, optimizers = checkpoint_.get(checkpoint.KEY), dict(enumerate(self.optimizers))
            checkpoint.restore(self.wrapper, self.running, optimizers, saved)

    # --- asynchronous algorithms rest while this rank does not train ---

    @contextlib.contextmanager
    def pause(self) -> Any:
        """Within it, asynchronous averaging goes on without this rank."""
        began_here = not self._paused
        self._rest()
        try:
            yield
        finally:
            if began_here:
                self._go_on()

    def _rest(self) -> None:
        if self.wrapper is not None and not self._paused:
            self._paused = True
            self.abort(self.wrapper)

    def _go_on(self) -> None:
        if self.wrapper is not None and self._paused:
            self._paused = False
            self.resume(self.wrapper)

    def abort(self, wrapper: Any) -> None:
        """Of an asynchronous algorithm; nothing otherwise."""

    def resume(self, wrapper: Any) -> None:
        """Of an asynchronous algorithm; nothing otherwise."""

    def on_validation_start(self) -> None:
        self._rest()
        super().on_validation_start()

    def on_validation_end(self) -> None:
        super().on_validation_end()
        self._go_on()

    # --- the end ---

    def on_exception(self, exception: BaseException) -> None:
        self._failed = True
        super().on_exception(exception)

    def teardown(self) -> None:
        wrapper = self.wrapper
        if wrapper is not None:
            if not self._failed:
                self._last = self._own_state()
            self.model = self.lightning_module
            try:
                self.unwrap(wrapper, crashed=self._failed)
            except Exception:
                if not self._failed:
                    raise
                _log.exception("gossamer: the end of a run that failed; its own error follows")
        super().teardown()
