"""What a hook of torch's DDP keeps for one model: its connections, its worker, and what codecs have left out, by
parameter name. The native part is csrc/hook/comm_hook.h; here are arguments, checks and what is saved.
"""

import atexit
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gossamer import _C
from gossamer.algorithms import PowerSGD
from gossamer.codec import Adaptive, Codec
from gossamer.comm import (
    Communicator,
    Flat,
    Hierarchical,
    connect_by_hosts,
    given_group,
    is_communicator,
    private,
    way_of,
)
from gossamer.engine import require_equal
from gossamer.errors import ConfigError
from gossamer.hooks.arguments import group_of, named_parameters
from gossamer.hooks.buckets import Buckets, algorithm_of
from gossamer.hooks.in_graph import key_for, mean_in_graph
from gossamer.torch_private import at_end_of_backward

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_open: "weakref.WeakSet[State]" = weakref.WeakSet()


class State:
    """The first argument of ddp.register_comm_hook, for one model and one of this package's hooks.

    The first bucket makes connections of its own between the ranks of the group, so the hook's traffic never meets
    DDP's; later ones are only queued.

    Args:
        model: the DistributedDataParallel; or, before there is one, the module that it will wrap, or its
            named_parameters(). Names of parameters are the module's, without "module.".
        process_group: the group that DDP averages over. None: the DistributedDataParallel's, else the default group.
            Or a communicator of the same ranks, which nothing else may use. Flat(group) and Hierarchical(group, hosts)
            say how sums go, which is by hosts where ranks share hosts.
        codec: for the hook `compress`: a Codec, or an Adaptive that chooses by parameter.
        powersgd: for the hook `powersgd`: a PowerSGD with other settings than the default's.

    Raises:
        ConfigError: another type, or a group that is not DDP's.
    """

    def __init__(
        self,
        model: "nn.Module | Iterable[tuple[str, nn.Parameter]]",
        *,
        process_group: "ProcessGroup | Communicator | Flat | Hierarchical | None" = None,
        codec: Codec | Adaptive | None = None,
        powersgd: PowerSGD | None = None,
    ) -> None:
        named = dict(named_parameters(model))
        if not named:
            raise ConfigError("hooks.State: the model has no parameters")
        if codec is not None and not isinstance(codec, (Codec, Adaptive)):
            raise ConfigError(f"hooks.State: codec must be a Codec, an Adaptive or None, got {codec!r}")
        if powersgd is not None and not isinstance(powersgd, PowerSGD):
            raise ConfigError(f"hooks.State: powersgd must be a PowerSGD or None, got {powersgd!r}")
        self._names, self._params = list(named), list(named.values())
        self._group = group_of(model, process_group)
        self._codec, self._powersgd = codec, powersgd
        self._hook: str | None = None
        self._native: Any = None
        self._buckets: Buckets | None = None
        self._settings = ""
        self._loaded: dict[str, Any] | None = None
        self._key = key_for(self)
        #: "flat" or "by hosts", and why; once the first bucket has come.
        self.sums: str | None = None

    # --- called by the hooks ---

    def run(self, hook: str, bucket: dist.GradBucket | tuple[Any, Any]) -> "torch.futures.Future[Tensor]":
        """Queues a bucket, or compiled autograd's (gradient, parameter), whose mean is there when backward ends."""
        if not isinstance(bucket, tuple):
            return self.start(hook).reduce_bucket(bucket)
        grad, param = bucket
        if torch.compiler.is_compiling():
            mean_in_graph(grad, param, self._key, hook)
            return grad  # whose value the graph is not told to look at
        future = self.start(hook).reduce_gradient(grad, param)
        at_end_of_backward(future.wait)
        return future

    def parameter_at(self, address: int) -> Tensor | None:
        """The parameter that lies there, for a graph that has its memory and not the object; None for an empty one."""
        if address == 0:
            return None
        for param in self._params:
            if param.data_ptr() == address:
                return param
        raise ConfigError(
            "hooks: a compiled backward holds a parameter that does not belong to the model of this State"
        )

    def start(self, hook: str) -> Any:
        """The native hook; made by the first call, which is collective."""
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
        """What this rank's next step depends on beside model and optimizer, by parameter name. Every rank has its own.

        Call it between steps. A run that loads it goes on bit for bit.
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
        """Takes what state_dict() returned on this rank, in a run of as many ranks.

        Raises:
            ConfigError: it is not of this model; or of another hook or codec (then by the first bucket, if none was
                sent yet).
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
        """Ends the worker and its connections; the model can send no more. Idempotent."""
        if self._native is not None:
            self._native.close()

    def __getstate__(self) -> dict[str, Any]:
        raise ConfigError(
            "hooks.State: it cannot be copied or pickled, because its connections belong to this process; save its "
            "state_dict()"
        )


@atexit.register
def _close_all() -> None:
    # A worker that runs Python must not outlive the interpreter.
    for state in list(_open):
        state.close()
