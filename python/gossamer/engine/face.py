"""What all wrappers of a model have in common, whatever arguments they take: state, figures, uneven inputs, the end.

Face also has the methods that torch.distributed.algorithms.Join calls; join.py does the work.
"""

import contextlib
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms import Join, Joinable

from gossamer import runtime
from gossamer.autotune import Tuned
from gossamer.comm import connect_by_hosts, is_communicator, is_default, private_among
from gossamer.engine.algorithm import Algorithm
from gossamer.engine.connections import Connections, connect, device_of
from gossamer.engine.engine import Engine
from gossamer.engine.join import ShadowHook
from gossamer.engine.living import take_over
from gossamer.engine.merging import merge_dicts
from gossamer.errors import ConfigError
from gossamer.observe.report import Report


class Face(Joinable):
    """A wrapper around an engine.

    Attributes:
        replaceable: whether gs.elastic() may close the engine and make another one over the next group.
    """

    module: Any
    replaceable: ClassVar[bool] = False
    _engine: Engine | None = None
    _awaiting: Sequence[torch.optim.Optimizer] | None = None  # of a newcomer that enters the group later
    links: Connections
    _given_group: Any  # the group that the model was wrapped with
    _hook_to_begin: ShadowHook | None = None

    def _wrap(
        self, algorithm: Algorithm, group: Any, optimizers: Sequence[torch.optim.Optimizer], **settings: Any
    ) -> None:
        """Make the engine of self.module, and new connections. Collective.

        A newcomer of an elastic run, which others let in by gs.elastic(), does so when the engine is first needed.

        Args:
            settings: the other arguments of Engine.
        """
        for name, child in self.module.named_modules():
            if isinstance(child, Face):
                raise ConfigError(
                    f"{type(self).__name__}: the model holds a wrapper already, '{name}' ({type(child).__name__}); "
                    f"give the model itself, which is the .module of that wrapper"
                )
        # Before the ranks meet: some may wait for this one in a backward of the wrapper before.
        take_over([*self.module.parameters()])
        algorithm.use_optimizers(optimizers)
        self._wrapped_with = algorithm, group, settings
        if self.replaceable and is_default(group) and runtime.is_newcomer():
            self._awaiting = optimizers
        else:
            self._begin(optimizers)

    def _begin(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        while True:
            try:
                links = self.connect()
                self.engage(links, optimizers, restored=runtime.state_lives())
                return
            except RuntimeError:  # torch's own too
                # A newcomer of an elastic run has nothing to lose, nor has a member of the first group.
                if not runtime.lost_place():
                    raise
            runtime.renew()

    @property
    def awaits_group(self) -> bool:
        """Whether this process has come while others train, and enters their group when the engine is first needed."""
        return self._awaiting is not None

    @property
    def algorithm_given(self) -> Algorithm:
        """The algorithm that the model was wrapped with."""
        return self._wrapped_with[0]

    @property
    def wrapped_over(self) -> Any:
        """The group that the user gave."""
        return self._wrapped_with[1]

    def connect(self, ranks: Sequence[int] | None = None) -> Connections:
        """Make new connections. Collective over the group, or over some ranks of the default group."""
        _, group, _ = self._wrapped_with
        if ranks is not None:
            links = private_among(None, ranks, device_of(self.module), key="elastic")
            return Connections(connect_by_hosts(group, *links, overlap=True), links[1], None)
        return connect(self.module, group)

    def engage(
        self, links: Connections, optimizers: Sequence[torch.optim.Optimizer], *, restored: bool = False
    ) -> Engine:
        """Make an engine of self.module over these connections. The engine before must be closed. Collective.

        Args:
            restored: weights, and what the algorithm keeps of them, are brought from the engine before, or are copied
                from a rank that has them. So they are not copied or averaged now.
        """
        algorithm, _, settings = self._wrapped_with
        self._given_group, self.links = links.given, links
        changes = {"broadcast": False} if restored else {}
        with algorithm.restored() if restored else contextlib.nullcontext():
            self._engine = Engine(
                self.module, algorithm, comm=links.comm, control=links.control, **settings | changes
            )
        self._engine.watch(optimizers)
        return self._engine

    @property
    def engine(self) -> Engine:
        """The engine, which does the work."""
        if self._awaiting is not None:
            optimizers, self._awaiting = self._awaiting, None
            self._begin(optimizers)
        assert self._engine is not None
        return self._engine

    @property
    def tuned(self) -> Tuned | None:
        """The result of autotune, equal on every rank; None before it has ended, and without autotune."""
        return self.engine.tuned

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Let backward accumulate gradients without sending them. The next backward outside sends the sum."""
        return self.engine.no_sync()

    def consensus(self) -> None:
        """Replace parameters and floating-point buffers by their exact mean over the ranks, in place. Collective.

        With algorithms whose ranks hold different weights, call it before an evaluation, and before saving one model.
        """
        with torch.no_grad():
            self.engine.consensus()

    def algorithm_state_dict(self) -> dict[str, Any]:
        """Return what this rank needs to resume bit for bit, beside model.state_dict() and optimizer.state_dict().

        It holds counters, the bucket plan and the algorithm's own tensors by parameter name. Every rank saves its own
        state, between an optimizer step and the next forward.
        """
        return self.engine.state_dict()

    def part_of_checkpoint(self, saved: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return what this rank loads of a checkpoint that any number of ranks have saved. Sends nothing.

        If as many ranks saved as this run has, it is what this rank saved. Otherwise all ranks get the mean of the
        models and of the optimizers' states, and a state of the algorithm that docs/resuming.md describes.

        Args:
            saved: what every rank saved, in rank order: dictionaries whose key "algorithm" holds
                algorithm_state_dict(). Their other keys must hold the state of models and optimizers.

        Raises:
            ConfigError: a rank's state is missing, the ranks saved different steps, or the algorithm cannot merge them.
        """
        place = self.engine.place
        if len(saved) == place["size"]:
            return dict(saved[place["rank"]])
        with torch.no_grad():
            return merge_dicts(saved, self.engine.merged_state)

    def load_algorithm_state_dict(self, state: dict[str, Any]) -> None:
        """Load what algorithm_state_dict() returned on this rank, or part_of_checkpoint(). Collective.

        Load model and optimizer first. Where ranks hold different weights, wrap the model with broadcast=False.

        Raises:
            ConfigError: on every rank. The ranks load different steps, or the state does not fit this model.
        """
        with torch.no_grad():
            self.engine.load_state_dict(state)

    def count(self, samples: float) -> None:
        """Weight this rank by the samples, or tokens, that it has seen. Called before a backward; sends nothing itself.

        The mean over the ranks then is the mean over all samples: rank r's gradients are multiplied by its count,
        divided by the mean of all ranks' counts, before they are encoded. It holds for the next synchronised backward,
        with what was accumulated under no_sync() before. Every rank must call it before each of them, or none. A rank
        with 0 samples takes part, and adds nothing. With LocalSGD, counts add up until the next averaging.

        Args:
            samples: at least 0. The rank's gradients must be those of the mean over these samples.

        Raises:
            ConfigError: the algorithm does not weight by samples. The backward raises it on every rank if only some
                ranks have counted.
        """
        self.engine.count(samples)

    def report(self, *, reset: bool = False, codec_error: bool = False) -> Report:
        """Return the times and bytes of this rank's steps: see gossamer.observe.Report. Sends nothing.

        Args:
            reset: start to count anew afterwards.
            codec_error: report the relative error of each codec on this rank's gradients of the last step. The first
                such report has no figure yet: from then on the engine keeps a copy of the gradients, until a report
                does not ask.
        """
        return self.engine.report(reset=reset, codec_error=codec_error)

    def close(self) -> None:
        """End the engine. The wrapped model remains, with its weights and gradients. Idempotent."""
        if self._engine is not None:
            self._engine.close()

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> contextlib.AbstractContextManager[None]:
        """Let ranks have different numbers of batches: `with model.join():` around the training loop of every rank.

        A rank that is out of batches takes part in the synchronised backwards of the others with zero gradients. When
        all ranks are out, they copy weights, buffers and optimizer states from a rank that made the most steps. Ranks
        that made fewer steps have no gradients then. Collective.

        Args:
            divide_by_initial_world_size: divide gradients by the number of ranks; False: by the number of ranks that
                still have batches. As in torch DDP.
            enable: False: do nothing.
            throw_on_early_termination: raise in the first backward in which one rank is out of batches.

        Raises:
            ConfigError: on every rank. At the beginning: the algorithm sends more than gradients, or the arguments
                differ between ranks. At the end: an optimizer's state cannot be copied.
            RuntimeError: one rank is out of batches, and throw_on_early_termination is set.
            CommError: another rank has failed. Any other exception that leaves the context on one rank counts as a
                failure, and stops the engines of all ranks.
        """
        if not enable:
            return contextlib.nullcontext()
        return self.engine.uneven.context(
            divide_by_initial_world_size=divide_by_initial_world_size,
            throw_on_early_termination=throw_on_early_termination,
        )

    def join_hook(self, **kwargs: Any) -> ShadowHook:
        """Return the hook for torch.distributed.algorithms.Join([model, ...], divide_by_initial_world_size=True)."""
        self._require_group()
        # Torch DDP notifies in forward. Here a backward does it, because a forward may have no backward.
        this = weakref.ref(self)
        self._hook_to_begin = hook = ShadowHook(
            self.engine.uneven,
            divide_by_initial_world_size=kwargs.get("divide_by_initial_world_size", True),
            notify=lambda: Join.notify_join_context(face) if (face := this()) is not None else None,
        )
        return hook

    @property
    def _join_config(self) -> Any:
        # Join sets this private name after it has called join_hook(). Nothing else says whether the Join is enabled.
        return self._join_settings

    @_join_config.setter
    def _join_config(self, settings: Any) -> None:
        self._join_settings, hook, self._hook_to_begin = settings, self._hook_to_begin, None
        if hook is not None and settings.enable:
            hook.begin()

    @property
    def join_device(self) -> torch.device:
        """The device of Join's own collectives."""
        return self.engine.uneven.device

    @property
    def join_process_group(self) -> Any:
        """The process group that the model was wrapped with, which Join's own collectives use.

        Raises:
            ConfigError: The model was wrapped with a communicator.
        """
        self._require_group()
        return self._given_group if self._given_group is not None else dist.group.WORLD

    def _require_group(self) -> None:
        if is_communicator(self._given_group):
            raise ConfigError(
                f"{type(self).__name__}: torch's Join needs a process group, and this model was wrapped with a "
                f"communicator; use model.join(), or wrap with a process group"
            )


def refuse_assigned_parameters(wrapper: nn.Module, _incompatible: Any) -> None:
    """Raise ConfigError if load_state_dict(assign=True) has put other parameters into the model of a wrapper.

    For nn.Module.register_load_state_dict_post_hook.
    """
    assert isinstance(wrapper, Face)
    wrapper.engine.require_same_parameters(wrapper.module)
