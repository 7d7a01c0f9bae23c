"""What a hook of torch's DDP keeps for one model: connections, a worker, and the codecs' errors by parameter name.

The native part is csrc/hook/comm_hook.h. This file has the arguments, the checks and the saved state.
"""

import atexit
import weakref
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gossamer import _C
from gossamer.algorithms import PowerSGD
from gossamer.codec import Adaptive, Codec
from gossamer.comm import (
    Communicator,
    GroupLike,
    connect_by_hosts,
    given_group,
    is_communicator,
    private,
    way_of,
)
from gossamer.engine import require_equal, take_over
from gossamer.errors import ConfigError
from gossamer.hooks.buckets import Buckets, algorithm_of
from gossamer.hooks.in_graph import key_for, mean_in_graph
from gossamer.torch_private import at_end_of_backward

_open: "weakref.WeakSet[State]" = weakref.WeakSet()


class State:
    """The first argument of ddp.register_comm_hook, for one model and one of this package's hooks.

    The hook has its own connections between the ranks, so its traffic never meets DDP's. The first bucket makes them.

    Args:
        model: the DistributedDataParallel; or, before there is one, the module that it will wrap or its
            named_parameters(). The names of parameters are the module's, without "module.".
        process_group: the group that DDP averages over, or a communicator of the same ranks that nothing else uses.
            None: the DistributedDataParallel's group, else the default group. Sums go by hosts where ranks share
            hosts, and the rest as in gossamer.DataParallel.
        codec: for the hook `compress`: a Codec, or an Adaptive that chooses one for each parameter.
        powersgd: for the hook `powersgd`: a PowerSGD whose settings are not the default ones.

    Raises:
        ConfigError: an argument has another type, or the group is not DDP's.
    """

    def __init__(
        self,
        model: "nn.Module | Iterable[tuple[str, nn.Parameter]]",
        *,
        process_group: GroupLike = None,
        codec: Codec | Adaptive | None = None,
        powersgd: PowerSGD | None = None,
    ) -> None:
        named = dict(_named_parameters(model))
        if not named:
            raise ConfigError("hooks.State: the model has no parameters")
        if codec is not None and not isinstance(codec, (Codec, Adaptive)):
            raise ConfigError(f"hooks.State: codec must be a Codec, an Adaptive or None, got {codec!r}")
        if powersgd is not None and not isinstance(powersgd, PowerSGD):
            raise ConfigError(f"hooks.State: powersgd must be a PowerSGD or None, got {powersgd!r}")
        self._names, self._params = list(named), list(named.values())
        self._group = _group_of(model, process_group)
        self._codec, self._powersgd = codec, powersgd
        self._hook: str | None = None
        self._native: Any = None
        self._buckets: Buckets | None = None
        self._settings = ""
        self._loaded: dict[str, Any] | None = None
        self._key = key_for(self)
        take_over(self._params)  # from a wrapper that nobody uses any more, or that is left for this
        #: "flat" or "by hosts", and why. None before the first bucket.
        self.sums: str | None = None

    # --- called by the hooks ---

    def run(self, hook: str, bucket: dist.GradBucket | tuple[Any, Any]) -> "torch.futures.Future[Tensor]":
        """Queues a bucket, or a (gradient, parameter) of compiled autograd. Its mean is ready when backward ends."""
        if not isinstance(bucket, tuple):
            return self.start(hook).reduce_bucket(bucket)
        grad, param = bucket
        if torch.compiler.is_compiling():
            mean_in_graph(grad, param, self._key, hook)
            return grad  # the graph does not read this value
        future = self.start(hook).reduce_gradient(grad, param)
        at_end_of_backward(future.wait)
        return future

    def parameter_at(self, address: int) -> Tensor | None:
        """The parameter at a memory address, which is all that a graph has of it. None for an empty parameter."""
        found = next((param for param in self._params if param.data_ptr() == address), None)
        if found is None and address != 0:
            raise ConfigError(
                "hooks: a compiled backward holds a parameter that does not belong to the model of this State"
            )
        return found if address != 0 else None

    def start(self, hook: str) -> Any:
        """Returns the native hook. The first call makes it and is collective."""
        if self._hook is not None:
            if self._hook != hook:
                raise ConfigError(
                    f"hooks: this State serves the hook {self._hook}, and cannot serve {hook} too; make another"
                )
            return self._native
        comm, control = self._connections()
        self.sums = way_of(comm)
        algorithm, settings = algorithm_of(hook, codec=self._codec, powersgd=self._powersgd)
        shapes = zip(self._names, self._params, strict=True)
        lines = [f"{name} {list(param.shape)} {param.dtype}" for name, param in shapes]
        require_equal(control, [f"hook {hook}: {settings}", *lines], "hooks: the model of State")
        self._buckets = Buckets(algorithm, self._names, self._params, comm)
        self._native = _C.CommHook(comm, control, self._params, self._buckets.arrange)
        self._hook, self._settings = hook, settings
        try:
            if self._loaded is not None:
                self._restore(self._loaded)
        except BaseException:
            self._native.close()
            self._native = self._hook = self._buckets = None
            raise
        _open.add(self)
        return self._native

    def _connections(self) -> tuple[Communicator, Communicator]:
        given: Any = given_group(self._group)
        comm, control = (given, given) if is_communicator(given) else private(given, self._params[0].device)
        return connect_by_hosts(self._group, comm, control), control

    # --- what a resumed run needs ---

    def state_dict(self) -> dict[str, Any]:
        """What this rank's next step depends on besides model and optimizer, by parameter name. Each rank has its own.

        Call it between steps. A run that loads it continues with the same bits.
        """
        if self._buckets is None:
            return dict(self._loaded) if self._loaded is not None else {}
        self._native.wait()
        return {
            "hook": self._hook,
            "settings": self._settings,
            "steps": self._native.steps,
            **self._buckets.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads what state_dict() returned on this rank, in a run with the same number of ranks.

        Raises:
            ConfigError: the state belongs to another model, hook or codec. Before the first bucket, another hook or
                codec is found only when that bucket comes.
        """
        if state and set(state) != {"hook", "settings", "steps", "errors", "algorithm"}:
            raise ConfigError(
                f"hooks.State.load_state_dict: must be what state_dict() returned, got {state!r:.200}"
            )
        shapes = {name: param.shape for name, param in zip(self._names, self._params, strict=True)}
        for name, error in state.get("errors", {}).items():
            if shapes.get(name) != error.shape:
                raise ConfigError(
                    f"hooks.State.load_state_dict: the error of '{name}' must have that parameter's shape, got "
                    f"{list(error.shape)} for {list(shapes[name]) if name in shapes else 'no such parameter'}"
                )
        if self._buckets is not None and not state:
            raise ConfigError(
                "hooks.State.load_state_dict: the state is of before the first step, and this State has made "
                f"{self._native.steps}; make a new State"
            )
        self._loaded = dict(state) if state else None
        if self._buckets is not None:
            self._native.wait()
            self._restore(state)

    def _restore(self, state: dict[str, Any]) -> None:
        assert self._buckets is not None
        saved, own = (state["hook"], state["settings"]), (self._hook, self._settings)
        if saved != own:
            raise ConfigError(
                f"hooks.State.load_state_dict: the state is of the hook {saved[0]} with {saved[1]}, and this one is "
                f"{own[0]} with {own[1]}"
            )
        self._native.forget()
        self._buckets.load_state_dict(state)
        self._native.steps = state["steps"]
        self._loaded = None

    def close(self) -> None:
        """Ends the worker and its connections. The model can then send no more. A second call does nothing."""
        if self._native is not None:
            self._native.close()

    def __getstate__(self) -> dict[str, Any]:
        raise ConfigError(
            "hooks.State: it cannot be copied or pickled, because its connections belong to this process; save its "
            "state_dict()"
        )


def _named_parameters(model: Any) -> Iterable[tuple[str, nn.Parameter]]:
    """Returns the (name, parameter) pairs of the model that State was given, named as without DDP around it."""
    if isinstance(model, DistributedDataParallel):
        return model.module.named_parameters()
    if isinstance(model, nn.Module):
        return model.named_parameters()
    pairs = isinstance(model, Iterable) and not isinstance(model, (str, bytes, dict))
    named = list(model) if pairs else [model]
    for pair in named:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], Tensor)):
            raise ConfigError(
                "hooks.State: model must be a DistributedDataParallel, a module or (name, parameter) pairs, got "
                f"{pair!r}"
            )
    return named


def _group_of(model: Any, group: Any) -> Any:
    """Returns the group that State uses. ConfigError if it is not the group that the model averages over."""
    if not isinstance(model, DistributedDataParallel):
        return group
    own, given = model.process_group, given_group(group)
    if given is None:
        return own if group is None else replace(group, group=own)
    wanted = (own.rank(), own.size())
    if given is own or (is_communicator(given) and (given.rank, given.size) == wanted):
        return group
    got = f"rank {given.rank} of {given.size}" if is_communicator(given) else repr(given)
    raise ConfigError(
        f"hooks.State: process_group must be the one that the model averages over, where this is rank {wanted[0]} of "
        f"{wanted[1]}, got {got}"
    )


@atexit.register
def _close_all() -> None:
    # A worker that runs Python must not outlive the interpreter.
    for state in list(_open):
        state.close()
