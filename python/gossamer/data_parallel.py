"""gs.DataParallel, the native face: a module whose gradients are averaged over the ranks.

Argument translation only; the engine does the work. Its state_dict is the wrapped model's own.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gossamer import config
from gossamer.algorithms import Algorithm, resolve
from gossamer.comm import Communicator, Flat, Hierarchical, Symmetric
from gossamer.engine import (
    Autotune,
    Engine,
    Face,
    Tuned,
    autotune_of,
    connect,
    optimizers_of,
    refuse_assigned_parameters,
)
from gossamer.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class DataParallel(nn.Module, Face):
    """Wraps a model so that loss.backward() leaves the averaged gradient in every param.grad.

    The training loop stays as it was: forward, backward, optimizer.step(). param.grad becomes a view of a
    bucket's flat memory. state_dict() and load_state_dict() are those of the wrapped model, without a
    "module." prefix, also where this wrapper is part of a larger model; parameters' names do have it.

    Args:
        module: the model, on its final device and dtype. `model.module` is this object.
        optimizer: the optimizer of its parameters, or several; a step is over when each has stepped. Needed by the
            algorithms that count steps or send weights.
        algorithm: an Algorithm, or its name.
        process_group: a process group, a communicator, or None for the default group. Where ranks share hosts, and
            there are several, sums are exact inside a host, and only the way between hosts is compressed: Flat(group)
            says one level, Hierarchical(group, hosts) other hosts. Symmetric(group): the ranks share one host and are
            to read each other's buckets in place. A process group lends its ranks, its kind of backend and its
            timeout: the model gets connections of its own, so all must wrap.
        bucket_bytes: bytes of gradients that travel together; the first bucket holds `first_bucket_bytes`.
            Defaults come from gossamer.config.
        broadcast: copy parameters and buffers (frozen ones too) from rank 0. False where ranks differ on purpose.
        autotune: True, or an Autotune: measure the first steps, at most 200, and go on with the bucket size and the
            codec of each bucket that took the least time; see `tuned`. Only for algorithms that average gradients.

    Buffers are copied at wrap only; each rank's BatchNorm statistics are its own afterwards.

    Raises:
        ConfigError: on every rank, if models or settings differ between ranks, naming the first difference.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        *,
        algorithm: str | Algorithm = "gradient_allreduce",
        process_group: "ProcessGroup | Communicator | Flat | Hierarchical | Symmetric | None" = None,
        bucket_bytes: int | None = None,
        first_bucket_bytes: int | None = None,
        broadcast: bool = True,
        autotune: bool | Autotune = False,
    ) -> None:
        super().__init__()
        Face.__init__(self)
        if not isinstance(module, nn.Module):
            raise ConfigError(f"DataParallel: module must be a torch.nn.Module, got {type(module).__name__}")
        optimizers = optimizers_of("DataParallel", optimizer)
        settings = config.current()
        self.module = module
        self.training = module.training
        self.algorithm = resolve(algorithm)
        bucket_bytes = settings.bucket_bytes if bucket_bytes is None else bucket_bytes
        first = settings.first_bucket_bytes if first_bucket_bytes is None else first_bucket_bytes
        if bucket_bytes <= 0 or first <= 0:
            raise ConfigError(
                f"DataParallel: bucket_bytes and first_bucket_bytes must be positive, got {bucket_bytes} and {first}"
            )
        if self.algorithm.needs_optimizer and not optimizers:
            raise ConfigError(
                f"DataParallel: {self.algorithm!r} counts optimizer steps; give the optimizer as second argument"
            )
        self.algorithm.require_free()
        self.algorithm.use_optimizers(optimizers)
        links = connect(module, process_group)
        self._given_group = links.given
        self._engine = Engine(
            module,
            self.algorithm,
            comm=links.comm,
            control=links.control,
            bucket_bytes=bucket_bytes,
            first_bucket_bytes=first,
            broadcast=broadcast,
            autotune=autotune_of(autotune),
        )
        self.engine.watch(optimizers)
        self.register_state_dict_post_hook(_drop_module_prefix)
        self.register_load_state_dict_pre_hook(_add_module_prefix)
        self.register_load_state_dict_post_hook(refuse_assigned_parameters)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped model's forward."""
        self.engine.before_forward()
        return self.engine.after_forward(self.module(*args, **kwargs))

    @property
    def tuned(self) -> Tuned | None:
        """What autotune ended with, the same on every rank; None before, and without it."""
        return self.engine.tuned

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, backward accumulates without communication; the next backward outside sends the sum."""
        with self.engine.no_sync():
            yield

    def __getstate__(self) -> dict[str, Any]:
        raise ConfigError(
            "DataParallel: it cannot be copied or pickled, because its engine belongs to this process; "
            "copy or pickle model.module"
        )


def _drop_module_prefix(_module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    inner = prefix + "module."
    for key in [key for key in state if key.startswith(inner)]:
        state[prefix + key[len(inner) :]] = state.pop(key)
    # The modules' versions, under both names: a bare model and a wrapper inside a larger model look for them.
    versions = getattr(state, "_metadata", {})
    for key in [key for key in versions if f"{key}.".startswith(inner)]:
        versions[(prefix + f"{key}."[len(inner) :])[:-1]] = versions[key]


def _add_module_prefix(wrapper: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    versions = getattr(state, "_metadata", {})
    for key in [key for key in versions if f"{key}.".startswith(prefix)]:
        versions.setdefault((prefix + "module." + f"{key}."[len(prefix) :])[:-1], versions[key])
    # A checkpoint of stock DDP has the prefix already.
    wrapped_before = all(key.startswith(prefix + "module.") for key in state if key.startswith(prefix))
    if wrapped_before and not hasattr(wrapper.module, "module"):
        return
    for key in [key for key in state if key.startswith(prefix)]:
        state[prefix + "module." + key[len(prefix) :]] = state.pop(key)
