"""Names of torch's DistributedDataParallel that programs use although its documentation has them not: attributes that
Lightning and Accelerate read, and methods with an underscore. Mixed into the wrapper.
"""

import warnings
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gossamer.algorithms import Algorithm, CommHook, GradientAllReduce
from gossamer.codec import FP16
from gossamer.ddp.arguments import group_of
from gossamer.errors import ConfigError, UsageError


class Reducer:
    """What programs ask of `ddp.reducer`: that the next backward communicates, whatever the forward said."""

    def __init__(self, ddp: Any) -> None:
        self._ddp = ddp

    def prepare_for_backward(self, _outputs: Any = ()) -> None:
        """The next backward sends gradients."""
        self._ddp.engine.sync = True

    def prepare_for_forward(self) -> None:
        """Nothing: forward() does it."""

    def _rebuild_buckets(self) -> bool:
        """False: the engine plans again by itself, at the end of a backward."""
        return False

    def _delay_all_reduce(self) -> None:
        """Nothing: a static graph's first backward sends everything at its end."""


class TorchNames:
    """See the top of the file."""

    module: nn.Module
    engine: Any  # a property of the wrapper
    _engine: Any
    forward_sync_buffers: bool
    find_unused_parameters: bool
    gradient_as_bucket_view: bool
    static_graph: bool
    _group: Any
    _given_group: Any
    _sizes: Any
    _place: tuple[int, int]

    @property
    def process_group(self) -> Any:
        """The group that it was wrapped with; the default group for None."""
        return self._given_group if self._given_group is not None else dist.group.WORLD

    @property
    def reducer(self) -> Reducer:
        """Stands for torch's."""
        return Reducer(self)

    @property
    def device(self) -> torch.device:
        """Of the first parameter."""
        return next(self.module.parameters()).device

    @property
    def device_type(self) -> str:
        """Of the parameters."""
        return self.device.type

    @property
    def bucket_bytes_cap(self) -> int:
        """Bytes of a bucket."""
        return int(self._sizes[0])

    @property
    def _distributed_rank(self) -> int:
        return self._place[0]

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Collection[str]
    ) -> None:
        """Before wrapping: parameters and buffers, by name, that are each rank's own."""
        setattr(module, "_ddp_params_and_buffers_to_ignore", params_and_buffers_to_ignore)  # noqa: B010

    def _set_static_graph(self) -> None:
        """static_graph=True, before the first backward."""
        if self.static_graph:
            self._warn("You've set static_graph to be True, no need to set it again.", UserWarning)
            return
        self.static_graph = True
        self.engine.graph.use_static()

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """torch's hooks in C++, by ours: ALLREDUCE, and FP16_COMPRESS, which sums in float32. Collective."""
        known = (dist.BuiltinCommHookType.ALLREDUCE, dist.BuiltinCommHookType.FP16_COMPRESS)
        if comm_hook_type not in known:
            raise ConfigError(
                f"_register_builtin_comm_hook: must be ALLREDUCE or FP16_COMPRESS, got {comm_hook_type!r}"
            )
        self.register_comm_hook(None, comm_hook_type)  # type: ignore[attr-defined]

    @staticmethod
    def _algorithm_of_hook(state: Any, hook: Any) -> Algorithm:
        if not isinstance(hook, dist.BuiltinCommHookType):
            return CommHook(state, hook)
        half = hook is dist.BuiltinCommHookType.FP16_COMPRESS
        return GradientAllReduce(codec=FP16() if half else None)

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Facts under the names that torch gives them."""
        trained = [param for param in self.module.parameters() if param.requires_grad]
        rank, size = self._place
        return {
            "module_name": type(self.module).__name__,
            "world_size": size,
            "rank": rank,
            "iteration": self.engine.backward_count,
            "bucket_cap_bytes": self.bucket_bytes_cap,
            "bucket_sizes": ", ".join(str(bucket.bytes) for bucket in self.engine.buckets),
            "num_parameter_tensors": len(trained),
            "total_parameter_size_bytes": sum(param.numel() * param.element_size() for param in trained),
            "broadcast_buffers": int(self.forward_sync_buffers),
            "find_unused_parameters": int(self.find_unused_parameters),
            "gradient_as_bucket_view": int(self.gradient_as_bucket_view),
            "static_graph": int(self.static_graph),
            "comm_hook": getattr(self.engine.algorithm, "hook", ""),
        }

    def _update_process_group(self, new_process_group: Any) -> None:
        """Goes on among the ranks of another group, with the weights that each has. Collective over that group.

        Counters and what codecs have left out begin anew. A rank that is not in the group is left with model.module
        alone. A registered hook stays, and sends through the group that it was given.
        """
        self.engine.close()
        if new_process_group is dist.GroupMember.NON_GROUP_MEMBER:
            return
        self._group, self._engine = group_of(new_process_group, None), None
        assert self.engine is not None  # which makes another

    def _check_reducer_finalized(self) -> None:
        """Nothing: a backward that did not end well has raised."""

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Nothing: outputs are never cloned, and may be changed in place."""

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """UsageError: steps are not timed here."""
        raise UsageError(
            f"_set_ddp_runtime_logging_sample_rate: gossamer takes no times of steps, got {sample_rate!r}; use "
            "torch.profiler"
        )

    def _register_fused_optim(self, optim: Any, *args: Any, **kwargs: Any) -> None:
        """UsageError: an optimizer that steps inside backward would use gradients that have not arrived."""
        raise UsageError(
            f"_register_fused_optim: optimizers step after backward() here, got {optim!r}; make the optimizer and call "
            "its step()"
        )

    def _set_sparse_metadata(self, global_unique_ids: Any) -> None:
        """UsageError: there are no sparse gradients here."""
        raise UsageError("_set_sparse_metadata: sparse gradients are not supported; use sparse=False")

    @staticmethod
    def _warn(text: str, category: type[Warning] = FutureWarning) -> None:
        warnings.warn(text, category, stacklevel=3)
