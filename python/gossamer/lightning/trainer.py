"""What the Trainer's strategies have in common: reductions, wrapping, checkpoints, and the end of a run.

The classes are mixins over the DDPStrategy of either Lightning package, which brings launchers, ranks and process
groups. No class here is used alone; see gossamer.lightning.pytorch.
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
    """Uses the reductions of gossamer.lightning.distributed, and checks that the process group is the one asked for."""

    _layer_sync: Any
    _process_group_backend: str | None
    model: Any
    reduce = staticmethod(reduce)
    all_gather = staticmethod(all_gather_ddp_if_available)

    def setup_distributed(self) -> None:
        asked = self._process_group_backend
        super().setup_distributed()
        self._process_group_backend = asked  # Lightning has put its own default there
        require_group(asked, size=self.world_size, device=self.root_device)

    def _interrupted(self) -> bool:
        """Whether an exception ends the run. Callbacks learn of it before on_exception() does."""
        module = self.lightning_module
        return module is not None and module._trainer is not None and module.trainer.interrupted

    def setup(self, trainer: Any) -> None:
        if self.root_device.type == "cpu" and type(self._layer_sync).__name__ == "TorchSyncBatchNorm":
            self._layer_sync = JoinedBatchNorm()  # torch's SyncBatchNorm works on GPUs only
        super().setup(trainer)


class Wrapping(Collective):
    """Wraps the model while it is fitted. A subclass says by wrap() which wrapper it uses."""

    _failed = False
    _paused = False
    _last: tuple[str, dict[str, Any]] | None = None  # the state of this rank at the end of fit()

    def wrap(self, model: Any) -> Any:
        """Return the model in its wrapper, which has an `engine`. Collective."""
        raise NotImplementedError

    def unwrap(self, wrapper: Any, *, crashed: bool) -> None:
        """End what wrap() made.

        Args:
            crashed: do not wait for other ranks.
        """
        wrapper.engine.close(crashed=crashed)

    @property
    def wrapper(self) -> Any:
        """The wrapped model; None outside of fit()."""
        return self.model if self.model is not self.lightning_module else None

    @property
    def running(self) -> Any:
        """The gossamer.Algorithm that trains the model.

        Raises:
            ConfigError: no fit() is under way.
        """
        if self.wrapper is None:
            raise ConfigError(f"{type(self).__name__}: an algorithm is at work during fit() only")
        return self.wrapper.engine.algorithm

    def consensus(self) -> None:
        """Replace weights and floating-point buffers by their exact mean over the ranks, in place. Collective.

        With algorithms whose ranks hold different weights, call it before a validation or at the end of training.

        Raises:
            ConfigError: no fit() is under way.
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
        """Do nothing: an algorithm needs the optimizers, which Lightning makes next."""

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        self.model = self.wrap(self.model)

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Tell the engine about a forward that did not go through the wrapper, as in manual optimization."""
        super().pre_backward(closure_loss)
        if self.wrapper is None or self.lightning_module.automatic_optimization:
            return
        engine = self.wrapper.engine
        # One training_step() may make several steps by hand. Without lockstep a forward may change weights, and this
        # backward belongs to a forward that has used the weights before that.
        if engine.algorithm.lockstep:
            engine.before_forward()
        engine.after_forward(closure_loss)

    # --- saving and resuming ---

    def save_checkpoint(
        self, checkpoint_: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Save a checkpoint with the algorithm's state of all ranks, also after fit(). Collective.

        After an exception the file has no such state. The other ranks, which may not know about the exception yet, get
        an error, so that they come to the barrier that follows.
        """
        if self._interrupted():
            _log.warning("gossamer: saved after an exception, without the algorithm's state: %s", filepath)
            if self.wrapper is not None:
                self.unwrap(self.wrapper, crashed=True)
            super().save_checkpoint(checkpoint_, filepath, storage_options)
            return
        with self.pause():
            if "optimizer_states" in checkpoint_ and (own := self._own_state()) is not None:
                checkpoint_ = {**checkpoint_, checkpoint.KEY: checkpoint.gather(own)}
            super().save_checkpoint(checkpoint_, filepath, storage_options)

    def _own_state(self) -> tuple[str, dict[str, Any]] | None:
        if self.wrapper is None:
            return self._last
        return checkpoint.own_state(self.wrapper, dict(enumerate(self.optimizers)))

    def load_optimizer_state_dict(self, checkpoint_: Any) -> None:
        super().load_optimizer_state_dict(checkpoint_)
        if self.wrapper is not None:
            saved = checkpoint_.get(checkpoint.KEY)
            checkpoint.restore(self.wrapper, dict(enumerate(self.optimizers)), saved)

    # --- asynchronous algorithms pause while this rank does not train ---

    @contextlib.contextmanager
    def pause(self) -> Any:
        """Let asynchronous averaging go on without this rank inside the context."""
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
        """Stop an asynchronous algorithm. Do nothing for any other."""
        if hasattr(wrapper.engine.algorithm, "abort"):
            wrapper.engine.algorithm.abort()

    def resume(self, wrapper: Any) -> None:
        """Start an asynchronous algorithm again. Do nothing for any other."""
        if hasattr(wrapper.engine.algorithm, "resume"):
            wrapper.engine.algorithm.resume()

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
