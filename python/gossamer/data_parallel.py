"""gs.DataParallel, the native face: a module whose gradients are averaged over the ranks.

It translates arguments; the engine does the work. Its state_dict is that of the wrapped model.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from gossamer import config
from gossamer.algorithms import Algorithm, resolve
from gossamer.comm import GroupLike
from gossamer.engine import Autotune, Face, autotune_of, optimizers_of, refuse_assigned_parameters
from gossamer.errors import ConfigError


class DataParallel(nn.Module, Face):
    """Wraps a model so that loss.backward() leaves the averaged gradient in every param.grad. Collective.

    The training loop stays as it is: forward, backward, optimizer.step(). param.grad becomes a view of a bucket's flat
    memory. state_dict() and load_state_dict() are those of the wrapped model, without the prefix "module.", also if the
    wrapper is part of a larger model. The names of parameters() do have the prefix.

    Buffers are copied only when the model is wrapped. Afterwards each rank has its own BatchNorm statistics.

    A newcomer of an elastic run wraps its model alone, and the others let it in by gs.elastic(). Errors come then.

    Args:
        module: the model, on its final device and in its final dtype. `model.module` is this object.
        optimizer: the optimizer of the parameters, or several; a step is over when each has stepped. Algorithms that
            count steps or send weights need it.
        algorithm: an Algorithm, or its name.
        process_group: a process group, a communicator, or None for the default group. The model gets its own
            connections among the ranks, with the group's kind of backend and timeout, so all ranks must wrap. If there
            are several hosts with several ranks, sums are exact inside a host, and compressed only between hosts.
            Flat(group) makes one level of all ranks; Hierarchical(group, hosts) names other hosts; with
            Symmetric(group) the ranks share one host and read each other's buckets in place; with HostMemory(group)
            sums inside a host go through its memory, as they do by default where its GPUs have no peer access.
        bucket_bytes, first_bucket_bytes: bytes of gradients that travel together, and those of the first bucket. The
            defaults come from gossamer.config.
        broadcast: copy parameters and buffers, frozen ones too, from rank 0. False if ranks differ on purpose.
        autotune: True or an Autotune: measure the first steps, at most 200, and keep the bucket size and the codec of
            each bucket that took the least time; see `tuned`. Only for algorithms that average gradients.

    Raises:
        ConfigError: on every rank. Models or settings differ between ranks; the text names the first difference.
    """

    replaceable = True

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        *,
        algorithm: str | Algorithm = "gradient_allreduce",
        process_group: GroupLike = None,
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
        self.training: bool = module.training
        self.algorithm: Algorithm = resolve(algorithm)
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
        sizes = {"bucket_bytes": bucket_bytes, "first_bucket_bytes": first}
        tuning = autotune_of(autotune)
        self._wrap(self.algorithm, process_group, optimizers, **sizes, broadcast=broadcast, autotune=tuning)
        self.register_state_dict_post_hook(_drop_module_prefix)
        self.register_load_state_dict_pre_hook(_add_module_prefix)
        self.register_load_state_dict_post_hook(refuse_assigned_parameters)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped model's forward."""
        self.engine.before_forward()
        return self.engine.after_forward(self.module(*args, **kwargs))

    def __getstate__(self) -> dict[str, Any]:
        raise ConfigError(
            "DataParallel: it cannot be copied or pickled, because its engine belongs to this process; "
            "copy or pickle model.module"
        )


def _drop_module_prefix(_module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    inner = prefix + "module."
    for key in [key for key in state if key.startswith(inner)]:
        state[prefix + key[len(inner) :]] = state.pop(key)
    # The modules' versions get both names: a bare model looks for one, a wrapper inside a larger model for the other.
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
