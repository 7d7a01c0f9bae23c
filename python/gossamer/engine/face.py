"""What wrappers of one model have in common, whatever arguments they take: uneven inputs, state, the end.

join() is here with what torch.distributed.algorithms.Join asks of a model; join.py does the work.
"""

import contextlib
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms import Join, Joinable

from gossamer.comm import is_communicator
from gossamer.engine.engine import Engine
from gossamer.engine.join import ShadowHook
from gossamer.engine.worker import weak_call
from gossamer.errors import ConfigError
from gossamer.observe.report import Report


class Face(Joinable):
    """A wrapper around an engine."""

    module: Any
    _engine: Engine | None = None
    _given_group: Any  # what it was wrapped with
    _hook_to_begin: ShadowHook | None = None

    @property
    def engine(self) -> Engine:
        """What does the work."""
        assert self._engine is not None
        return self._engine

    def consensus(self) -> None:
        """Replaces parameters and floating-point buffers by their exact mean over the ranks, in place. Collective.

        For algorithms whose ranks differ: call it before evaluation and before saving one model for all.
        """
        with torch.no_grad():
            self.engine.consensus()

    def algorithm_state_dict(self) -> dict[str, Any]:
        """What this rank needs to go on bit for bit, beside model.state_dict() and optimizer.state_dict().

        Counters, the bucket plan and the algorithm's own tensors, by parameter name. Every rank saves its own. Call
        it between an optimizer step and the next forward.
        """
        return self.engine.state_dict()

    def load_algorithm_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what algorithm_state_dict() returned on this rank, in a run of as many ranks. Collective.

        Load model and optimizer first. Where ranks hold weights of their own, wrap without copying rank 0's.

        Raises:
            ConfigError: on every rank, if the ranks load different steps, or the state is not of this model.
        """
        with torch.no_grad():
            self.engine.load_state_dict(state)

    def report(self, *, reset: bool = False, codec_error: bool = False) -> Report:
        """What this rank's steps took, and what they sent: see gossamer.observe.Report. Sends nothing.

        Args:
            reset: afterwards, begin to count anew.
            codec_error: tell the relative error of each codec on this rank's gradients of the last step. They are
                kept from the first report that asks on, and until one does not, which takes as much memory again;
                so the first has no figure yet.
        """
        return self.engine.report(reset=reset, codec_error=codec_error)

    def close(self) -> None:
        """Ends the engine; the wrapped model goes on alone, with the gradients it has. Idempotent."""
        if self._engine is not None:
            self._engine.close()

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> contextlib.AbstractContextManager[None]:
        """`with model.join():` around a training loop on every rank, which may have different numbers of batches.

        A rank that is out of batches takes part in the synchronised backwards of the others with zero gradients. When
        all are out, all get weights, buffers and the state of the optimizers that the wrapper was given from a rank
        that made the most steps, and those that made fewer have no gradients. Collective.

        Args:
            divide_by_initial_world_size: gradients are divided by the number of ranks; False: by the number of those
                that still have batches. As in torch DDP.
            enable: False: do nothing.
            throw_on_early_termination: raise on every rank in the first backward in which one rank is out of batches.

        Raises:
            ConfigError: on every rank, when it is entered: the algorithm sends more than gradients, or the arguments
                differ between ranks. When it ends: an optimizer's state cannot be copied.
            RuntimeError: early termination, if it was asked for.
            CommError: another rank has failed. Any other exception that leaves the context on one rank is such a
                failure: it stops the engines of all.
        """
        if not enable:
            return contextlib.nullcontext()
        return self.engine.uneven.context(
            divide_by_initial_world_size=divide_by_initial_world_size,
            throw_on_early_termination=throw_on_early_termination,
        )

    def join_hook(self, **kwargs: Any) -> ShadowHook:
        """For torch.distributed.algorithms.Join([model, ...], divide_by_initial_world_size=True)."""
        self._require_group()
        self._hook_to_begin = hook = ShadowHook(
            self.engine.uneven,
            divide_by_initial_world_size=kwargs.get("divide_by_initial_world_size", True),
            notify=weak_call(weakref.WeakMethod(self._notify_join)),
        )
        return hook

    @property
    def _join_config(self) -> Any:
        # Torch's private name. Set when a Join is made, after join_hook(): nothing else says whether it is enabled.
        return self._join_settings

    @_join_config.setter
    def _join_config(self, settings: Any) -> None:
        self._join_settings, hook, self._hook_to_begin = settings, self._hook_to_begin, None
        if hook is not None and settings.enable:
            hook.begin()

    @property
    def join_device(self) -> torch.device:
        """Where Join's own collectives are."""
        return self.engine.uneven.device

    @property
    def join_process_group(self) -> Any:
        """The process group that the model was wrapped with; Join's own collectives go through it.

        Raises:
            ConfigError: it was wrapped with a communicator.
        """
        self._require_group()
        return self._given_group if self._given_group is not None else dist.group.WORLD

    def _require_group(self) -> None:
        if is_communicator(self._given_group):
            raise ConfigError(
                f"{type(self).__name__}: torch's Join needs a process group, and this model was wrapped with a "
                f"communicator; use model.join(), or wrap with a process group"
            )

    def _notify_join(self) -> None:
        # At the beginning of a backward, where torch DDP does it in forward: a forward may have no backward to shadow.
        Join.notify_join_context(self)


def refuse_assigned_parameters(wrapper: nn.Module, _incompatible: Any) -> None:
    """Of a wrapper, after load_state_dict(): ConfigError where assign=True has put other parameters in the model."""
    assert isinstance(wrapper, Face)
    wrapper.engine.require_same_parameters(wrapper.module)
