"""The wrapper itself. Arguments are translated in arguments.py; what torch's users reach for beside them is here and in
torch_names.py.
"""

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gossamer.algorithms import Algorithm
from gossamer.comm import Flat, Hierarchical, Symmetric
from gossamer.ddp import arguments, precision
from gossamer.ddp.buffers import Buffers
from gossamer.ddp.torch_names import TorchNames
from gossamer.engine import Engine, Face, connect, optimizers_of, refuse_assigned_parameters
from gossamer.errors import ConfigError, UsageError


class DistributedDataParallel(TorchNames, Buffers, nn.Module, Face):
    """torch.nn.parallel.DistributedDataParallel over Gossamer's engine: the same arguments, and `algorithm`.

    isinstance() takes it for one of torch's, so programs that look for those find and unwrap it. A torch argument
    means what torch's documentation says; docs/ddp.md lists what differs. Making one is collective.

    Args:
        process_group: as in torch; also a communicator, Flat(group), Hierarchical(group) or Symmetric(group).
        algorithm: an Algorithm, or its name, as in gossamer.DataParallel.
        optimizer: the optimizer of its parameters, or several, for algorithms that count steps or send weights.

    Raises:
        ConfigError: on every rank, if models or settings differ between ranks; for arguments, with torch's text.
        UsageError: the same, where torch raises RuntimeError.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: Any = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Sequence[tuple[str, nn.Parameter]] | None = None,
        param_to_hook_all_reduce: nn.Parameter | None = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: list[int] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        lazy_bucket_allocation: bool = False,
        *,
        algorithm: str | Algorithm = "gradient_allreduce",
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    ) -> None:
        super().__init__()
        Face.__init__(self)
        arguments.check_model(module)
        chosen = arguments.algorithm_of(algorithm, mixed_precision)
        self._group = arguments.group_of(process_group, device_mesh)
        self.device_ids, self.output_device = arguments.devices(module, device_ids, output_device)
        self.module, self.dim, self.training = module, dim, module.training
        self.forward_sync_buffers, buffers_too = arguments.sync_buffers(
            broadcast_buffers, forward_sync_buffers, chosen
        )
        self.find_unused_parameters, self.static_graph = find_unused_parameters, static_graph
        self.gradient_as_bucket_view, self.batched_grad_copy = gradient_as_bucket_view, batched_grad_copy
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.lazy_bucket_allocation = lazy_bucket_allocation
        self.mixed_precision = mixed_precision
        self.parameters_to_ignore = arguments.ignored(module)
        self.require_backward_grad_sync = self.require_forward_param_sync = True
        self._last = arguments.delayed(module, delay_all_reduce_named_params, param_to_hook_all_reduce)
        self._sizes = arguments.bucket_sizes(bucket_cap_mb, bucket_cap_mb_list)
        self._optimizers = optimizers_of("DistributedDataParallel", optimizer)
        self._hook: Any = None
        if check_reduction:
            self._warn("The `check_reduction` argument in `DistributedDataParallel` module is deprecated.")
        if mixed_precision is not None:
            precision.cast_buffers(mixed_precision, module, self.parameters_to_ignore)
        chosen.require_free()
        self._settings = copy.copy(chosen)  # for a pickle: as it is before it serves a model
        self._use(chosen, broadcast=init_sync, buffers_too=buffers_too)
        self.register_load_state_dict_post_hook(refuse_assigned_parameters)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward; copies rank 0's buffers first, where that is asked for."""
        self.engine.before_forward()
        self._buffers_before_forward()
        if self.device_ids:
            args, kwargs = arguments.moved((args, kwargs), torch.device(self.device_type, self.device_ids[0]))
        if self.mixed_precision is None:
            output = self.module(*args, **kwargs)
        else:
            output = precision.run(self.mixed_precision, self.module, self.parameters_to_ignore, args, kwargs)
        if self.output_device is not None and [self.output_device] != self.device_ids:
            output = arguments.moved(output, torch.device(self.device_type, self.output_device))
        self._buffers_after_forward(output)
        self.require_forward_param_sync = torch.is_grad_enabled() and self.require_backward_grad_sync
        if torch.is_grad_enabled():
            self.engine.sync = self.require_backward_grad_sync
        return self.engine.after_forward(output)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, what goes forward is accumulated without communication; the next outside sends the sum."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        """torch's communication hooks, in the place of the algorithm: hook(state, GradBucket) -> Future. Collective."""
        if self._hook is not None:
            raise UsageError("register_comm_hook or register_builtin_comm_hook can only be called once.")
        if self.mixed_precision is not None and self.mixed_precision.reduce_dtype is not None:
            raise UsageError(
                f"register_comm_hook: a hook decides what travels, so mixed_precision.reduce_dtype must not be given, "
                f"got {self.mixed_precision.reduce_dtype}"
            )
        algorithm = self._algorithm_of_hook(state, hook)
        self.close()
        self._use(algorithm, broadcast=False)
        self._hook = (state, hook)

    @property
    def engine(self) -> Engine:
        """The engine. After unpickling it is made by the first forward, which is collective then."""
        if self._engine is None:
            algorithm = (
                copy.copy(self._settings) if self._hook is None else self._algorithm_of_hook(*self._hook)
            )
            self._use(algorithm, broadcast=False)
        assert self._engine is not None
        return self._engine

    @property
    def algorithm(self) -> Any:
        """The algorithm at work."""
        return self.engine.algorithm

    def _use(self, algorithm: Algorithm, *, broadcast: bool, buffers_too: bool = True) -> None:
        if algorithm.needs_optimizer and not self._optimizers:
            raise ConfigError(
                f"DistributedDataParallel: {algorithm!r} counts optimizer steps; give optimizer=..."
            )
        algorithm.use_optimizers(self._optimizers)
        self._links = links = connect(self.module, self._group)
        self._given_group, self._place = links.given, (links.comm.rank, links.comm.size)
        bucket_bytes, first_bucket_bytes = self._sizes
        self._engine = engine = Engine(
            self.module,
            algorithm,
            comm=links.comm,
            control=links.control,
            bucket_bytes=bucket_bytes,
            first_bucket_bytes=first_bucket_bytes,
            last=self._last,
            broadcast=broadcast,
            buffers_too=buffers_too,
            ignore=self.parameters_to_ignore,
        )
        engine.watch(self._optimizers)
        engine.graph.require_used = not self.find_unused_parameters
        self._has_buffers = len(self.modules_buffers) > 0
        engine.uneven.sync_buffers = self.forward_sync_buffers and self._has_buffers
        if self.static_graph:
            engine.graph.use_static()

    def __getstate__(self) -> dict[str, Any]:
        plain = dist.is_initialized() and self.process_group is dist.group.WORLD
        if not plain or isinstance(self._group, (Flat, Hierarchical, Symmetric)):
            raise UsageError(
                "DDP Pickling/Unpickling are only supported when using DDP with the default process group. That is, "
                "when you have called init_process_group and have not passed process_group argument to DDP constructor"
            )
        return {**self.__dict__, "_engine": None, "_links": None, "_group": None, "_given_group": None}


torch.nn.parallel.DistributedDataParallel.register(DistributedDataParallel)
