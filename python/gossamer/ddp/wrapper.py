"""DistributedDataParallel: torch DDP's arguments, methods and attributes over the engine.

arguments.py checks the arguments and translates them. Attributes and underscored methods that torch does not document
are here because programs such as Lightning and Accelerate use them.
"""

import contextlib
import copy
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gossamer.algorithms import Algorithm, CommHook, GradientAllReduce
from gossamer.codec import FP16
from gossamer.comm import KINDS
from gossamer.ddp import arguments, precision
from gossamer.ddp.buffer_hook import BufferHook
from gossamer.engine import Engine, Face, broadcast_everywhere, optimizers_of, refuse_assigned_parameters
from gossamer.engine.admission import movable
from gossamer.errors import ConfigError, UsageError
from gossamer.torch_private import BufferCommHookLocation


class Reducer:
    """Stands for torch's `ddp.reducer`, which programs ask to let the next backward communicate."""

    def __init__(self, ddp: "DistributedDataParallel") -> None:
        self._ddp = ddp

    def prepare_for_backward(self, _outputs: Any = ()) -> None:
        """Let the next backward send gradients."""
        self._ddp.engine.native.set_output_sync(True)

    def prepare_for_forward(self) -> None:
        """Do nothing: forward() prepares itself."""

    _delay_all_reduce = (
        prepare_for_forward  # the first backward of a static graph sends everything at its end
    )

    def _rebuild_buckets(self) -> bool:
        """Return False: the engine plans again by itself, at the end of a backward."""
        return False


class DistributedDataParallel(nn.Module, Face):
    """torch.nn.parallel.DistributedDataParallel over Gossamer's engine: the same arguments, and `algorithm`.

    isinstance() says that it is one of torch's, so programs that look for those find and unwrap it. A torch argument
    means what torch's documentation says; docs/ddp.md lists the differences. Making one is collective.

    Args:
        process_group: as in torch; also a communicator, Flat(group), Hierarchical(group), HostMemory(group) or
            Symmetric(group).
        algorithm: an Algorithm, or its name, as in gossamer.DataParallel.
        optimizer: the optimizer of the parameters, or several, for algorithms that count steps or send weights.

    Raises:
        ConfigError: on every rank, if models or settings differ between ranks; for arguments, with torch's text.
        UsageError: the same, where torch raises RuntimeError.
    """

    device_ids: list[int] | None
    output_device: int | None
    forward_sync_buffers: bool
    require_forward_param_sync: bool
    _buffer_hook: BufferHook | None = None

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
        self.module = module
        self.dim: int = dim
        self.training: bool = module.training
        self.forward_sync_buffers, buffers_too = arguments.sync_buffers(
            broadcast_buffers, forward_sync_buffers, chosen
        )
        self.find_unused_parameters: bool = find_unused_parameters
        self.static_graph: bool = static_graph
        self.gradient_as_bucket_view: bool = gradient_as_bucket_view
        self.batched_grad_copy: bool = batched_grad_copy
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.lazy_bucket_allocation = lazy_bucket_allocation
        self.mixed_precision = mixed_precision
        self.parameters_to_ignore: list[str] = arguments.ignored(module)
        self._sync = self.require_forward_param_sync = True
        self._last = arguments.delayed(module, delay_all_reduce_named_params, param_to_hook_all_reduce)
        self._sizes = arguments.bucket_sizes(bucket_cap_mb, bucket_cap_mb_list)
        self._optimizers = optimizers_of("DistributedDataParallel", optimizer)
        self._hook: Any = None
        if check_reduction:
            self._warn("The `check_reduction` argument in `DistributedDataParallel` module is deprecated.")
        if mixed_precision is not None:
            precision.cast_buffers(mixed_precision, module, self.parameters_to_ignore)
        self._settings = copy.copy(chosen)  # for a pickle: as it is before it serves a model
        self._use(chosen, broadcast=init_sync, buffers_too=buffers_too)
        self.register_load_state_dict_post_hook(refuse_assigned_parameters)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward. Copy rank 0's buffers first, if forward_sync_buffers is set."""
        self.engine.before_forward(self._buffers_before_forward)
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
            self.engine.native.set_output_sync(self.require_backward_grad_sync)
        return self.engine.after_forward(output)

    @property
    def require_backward_grad_sync(self) -> bool:
        """As in torch, whether forwards from now on are sent; and backwards whose forward the wrapper has not seen."""
        return self._sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, sync: bool) -> None:
        self._sync = sync
        if self._engine is not None:
            self._engine.sync = sync

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let forwards inside accumulate gradients without sending them. The next one outside sends the sum."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        """Use one of torch's communication hooks in place of the algorithm. Collective.

        Args:
            hook: hook(state, GradBucket) returns a Future.
        """
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
        """The engine. After unpickling, the first forward makes it, and is collective."""
        if self._engine is None:
            chosen = self._algorithm_of_hook(*self._hook) if self._hook else copy.copy(self._settings)
            self._use(chosen, broadcast=False)
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
        self._wrap(
            algorithm,
            self._group,
            self._optimizers,
            bucket_bytes=self._sizes[0],
            first_bucket_bytes=self._sizes[1],
            last=self._last,
            broadcast=broadcast,
            buffers_too=buffers_too,
            ignore=self.parameters_to_ignore,
        )
        self._place, engine = (self.links.comm.rank, self.links.comm.size), self.engine
        engine.sync = self._sync
        engine.graph.require_used = not self.find_unused_parameters
        self._has_buffers = len(self.modules_buffers) > 0
        engine.uneven.sync_buffers = self.forward_sync_buffers and self._has_buffers
        if self.static_graph:
            engine.graph.use_static()

    @staticmethod
    def _algorithm_of_hook(state: Any, hook: Any) -> Algorithm:
        if not isinstance(hook, dist.BuiltinCommHookType):
            return CommHook(state, hook)
        half = hook is dist.BuiltinCommHookType.FP16_COMPRESS
        return GradientAllReduce(codec=FP16() if half else None)

    def __getstate__(self) -> dict[str, Any]:
        plain = dist.is_initialized() and self.process_group is dist.group.WORLD
        if not plain or isinstance(self._group, KINDS):
            raise UsageError(
                "DDP Pickling/Unpickling are only supported when using DDP with the default process group. That is, "
                "when you have called init_process_group and have not passed process_group argument to DDP constructor"
            )
        dropped = ("_engine", "links", "_group", "_given_group", "_wrapped_with")
        return {**self.__dict__, **dict.fromkeys(dropped)}

    # --- buffers ---

    @property
    def named_module_buffers(self) -> dict[str, Tensor]:
        """The buffers that the ranks share, by name."""
        named = self.module.named_buffers()
        return {name: buffer for name, buffer in named if name not in self.parameters_to_ignore}

    @property
    def modules_buffers(self) -> list[Tensor]:
        """The buffers that the ranks share."""
        return list(self.named_module_buffers.values())

    @property
    def broadcast_buffers(self) -> bool:
        """The older name of forward_sync_buffers."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, sync: bool) -> None:
        self.forward_sync_buffers = sync

    def will_sync_module_buffers(self) -> bool:
        """Return whether the next forward copies buffers."""
        return self.require_forward_param_sync and self.forward_sync_buffers and self._has_buffers

    def _register_buffer_comm_hook(
        self,
        state: Any,
        hook: Callable[[Any, dict[str, Tensor]], Any],
        comm_hook_location: Any = BufferCommHookLocation.POST_FORWARD,
    ) -> None:
        """Call hook(state, {name: buffer}) in place of the copy from rank 0, before a forward or after it.

        Backward waits for the futures that the hook returns.
        """
        self._buffer_hook = BufferHook(state, hook, comm_hook_location)

    def _default_broadcast_coalesced(
        self,
        bufs: Sequence[Tensor] | None = None,
        bucket_size: int | None = None,
        authoritative_rank: int = 0,
    ) -> None:
        """Copy tensors from one rank, in place, as a forward without a hook does. Collective.

        Args:
            bufs: None: the buffers that the ranks share.
            bucket_size: has no effect.
            authoritative_rank: the source, as a rank of the group.
        """
        self.engine.native.worker.wait()  # whose operations use the same connections
        # .data: else autograd reports that a buffer, which it has saved for backward, was changed.
        named = [(str(number), each) for number, each in enumerate(bufs or [])]
        tensors = [each.data for each in (self.engine.buffers if bufs is None else movable(named))]
        broadcast_everywhere(self.links.comm, self.links.control, tensors, authoritative_rank)

    def _buffers_before_forward(self) -> None:
        if self._buffer_hook is not None:
            self._buffer_hook.wait()  # the previous forward may have had no backward
        if self.will_sync_module_buffers() and (self._buffer_hook is None or self._buffer_hook.early):
            self._sync_buffers()

    def _buffers_after_forward(self, output: Any) -> None:
        if self._buffer_hook is not None:
            if self.will_sync_module_buffers() and not self._buffer_hook.early:
                self._sync_buffers()
            self._buffer_hook.watch(output)

    def _sync_buffers(self) -> None:
        hook = self._buffer_hook
        if hook is not None and self.engine.uneven.copies_buffers:
            raise UsageError(
                "join: ranks without a batch cannot take part in the hook of _register_buffer_comm_hook(); wrap with "
                "forward_sync_buffers=False, or make the numbers of batches equal"
            )
        with torch.no_grad():
            self.engine.sync_buffers(None if hook is None else lambda: hook.run(self.named_module_buffers))

    # --- names that torch does not document ---

    @property
    def process_group(self) -> Any:
        """The group that the model was wrapped with; None stands for the default group."""
        return self._given_group if self._given_group is not None else dist.group.WORLD

    @property
    def reducer(self) -> Reducer:
        """A stand-in for torch's Reducer."""
        return Reducer(self)

    @property
    def device(self) -> torch.device:
        """The device of the first parameter."""
        return next(self.module.parameters()).device

    @property
    def device_type(self) -> str:
        """The type of the parameters' device."""
        return self.device.type

    @property
    def bucket_bytes_cap(self) -> int:
        """The size of a bucket in bytes."""
        return self._sizes[0]

    @property
    def _distributed_rank(self) -> int:
        return self._place[0]

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Collection[str]
    ) -> None:
        """Name the parameters and buffers that belong to each rank alone. Call it before wrapping."""
        setattr(module, "_ddp_params_and_buffers_to_ignore", params_and_buffers_to_ignore)  # noqa: B010

    def _set_static_graph(self) -> None:
        """Set static_graph=True. Call it before the first backward."""
        if self.static_graph:
            self._warn("You've set static_graph to be True, no need to set it again.", UserWarning)
            return
        self.static_graph = True
        self.engine.graph.use_static()

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """Use torch's native hook ALLREDUCE, or FP16_COMPRESS, which sums in float32 here. Collective."""
        known = (dist.BuiltinCommHookType.ALLREDUCE, dist.BuiltinCommHookType.FP16_COMPRESS)
        if comm_hook_type not in known:
            raise ConfigError(
                f"_register_builtin_comm_hook: must be ALLREDUCE or FP16_COMPRESS, got {comm_hook_type!r}"
            )
        self.register_comm_hook(None, comm_hook_type)

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Return facts under torch's names."""
        trained = [param for param in self.module.parameters() if param.requires_grad]
        rank, size = self._place
        switches = ("broadcast_buffers", "find_unused_parameters", "gradient_as_bucket_view", "static_graph")
        return {
            "module_name": type(self.module).__name__,
            "world_size": size,
            "rank": rank,
            "iteration": self.engine.backward_count,
            "bucket_cap_bytes": self.bucket_bytes_cap,
            "bucket_sizes": ", ".join(str(bucket.bytes) for bucket in self.engine.buckets),
            "num_parameter_tensors": len(trained),
            "total_parameter_size_bytes": sum(param.nbytes for param in trained),
            **{switch: int(getattr(self, switch)) for switch in switches},
            "comm_hook": getattr(self.engine.algorithm, "hook", ""),
        }

    def _update_process_group(self, new_process_group: Any) -> None:
        """Continue with the ranks of another group, each with its own weights. Collective over that group.

        Counters and error feedback begin anew. A rank outside of the group keeps model.module alone. A registered hook
        stays, and sends through the group that it was given.
        """
        self.engine.close()
        if new_process_group is dist.GroupMember.NON_GROUP_MEMBER:
            return
        self._group, self._engine = arguments.group_of(new_process_group, None), None
        assert self.engine is not None  # makes another one

    def _check_reducer_finalized(self) -> None:
        """Do nothing: a backward that failed has raised."""

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Do nothing: outputs are never cloned, and may be changed in place."""

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Raise UsageError: steps are not timed here."""
        raise UsageError(
            f"_set_ddp_runtime_logging_sample_rate: gossamer takes no times of steps, got {sample_rate!r}; use "
            "torch.profiler"
        )

    def _register_fused_optim(self, optim: Any, *args: Any, **kwargs: Any) -> None:
        """Raise UsageError: an optimizer that steps inside backward would use gradients that have not arrived."""
        raise UsageError(
            f"_register_fused_optim: optimizers step after backward() here, got {optim!r}; make the optimizer and call "
            "its step()"
        )

    def _set_sparse_metadata(self, global_unique_ids: Any) -> None:
        """Raise UsageError: there are no sparse gradients here."""
        raise UsageError("_set_sparse_metadata: sparse gradients are not supported; use sparse=False")

    @staticmethod
    def _warn(text: str, category: type[Warning] = FutureWarning) -> None:
        warnings.warn(text, category, stacklevel=3)


torch.nn.parallel.DistributedDataParallel.register(DistributedDataParallel)
