"""Sends FSDP2's traffic through codecs: what fully_shard() gathers and scatters, and the all-reduce between replicas.

>>> fully_shard(model, mesh=mesh)
>>> gs.fsdp.compress(model, gs.Int8())

The shards stay exact, and so do the optimizer and its states. See docs/fsdp.md.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from gossamer._C import CodecBackend
from gossamer.codec import BF16, Codec, Int8
from gossamer.collectives import all_gather, all_reduce, reduce_scatter
from gossamer.errors import ConfigError
from gossamer.torch_private import premultiplier

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_GRADIENTS, _WEIGHTS = Int8(), BF16()


def compress(
    model: nn.Module,
    codec: Codec | None = _GRADIENTS,
    *,
    weights: Codec | None = _WEIGHTS,
    replicate: "ProcessGroup | None" = None,
) -> None:
    """Set the codecs of every module of `model` that fully_shard() has sharded. Call it before training.

    Args:
        codec: the codec of gradients, in the reduce-scatter and between replicas. Each rank that sends rounds once, and
            sums are in float32. None keeps FSDP's own reduce-scatter.
        weights: the codec of the all-gather before forward and backward. Layers compute with rounded weights; the
            optimizer steps exact shards. None keeps FSDP's own all-gather.
        replicate: for hybrid sharding, the ranks that hold the same shard of other replicas. Their mean is taken after
            the reduce-scatter. Shard over the other axis alone, by fully_shard(mesh=mesh["shard"]), and give
            mesh["replicate"].get_group(). None for a mesh of two axes: FSDP all-reduces by itself, with the options of
            the group. Such a group is made by init_device_mesh(backend_override=...) with gossamer.Options.

    Raises:
        ConfigError: Nothing is sharded, all codecs are None, a codec has error feedback, whose memory would not be
            sharded, or the model is sharded over a mesh with a replicate axis whose group has no gossamer.Options.
    """
    if codec is None and weights is None and replicate is None:
        raise ConfigError("fsdp.compress: give a codec for gradients or for weights, got None for both")
    for what, given in {"codec": codec, "weights": weights}.items():
        if given is not None and (not isinstance(given, Codec) or given.feeds_back):
            raise ConfigError(
                f"fsdp.compress: {what} must be a Codec without error feedback, or None, got {given!r}"
            )
    if replicate is not None and not isinstance(replicate, dist.ProcessGroup):
        raise ConfigError(f"fsdp.compress: replicate must be a process group or None, got {replicate!r}")
    _check_replicate_axis(model, replicate)
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not modules:
        raise ConfigError("fsdp.compress: no module of the model is sharded; call fully_shard() first")
    # FSDP has no stream for the hook if it knows of no replicas.
    cuda = any(param.is_cuda for param in model.parameters())
    for module in modules:
        if codec is not None:
            module.set_custom_reduce_scatter(_ReduceScatter(codec))  # type: ignore[arg-type]
        if weights is not None:
            module.set_custom_all_gather(_AllGather(weights))  # type: ignore[arg-type]
        if replicate is not None:
            stream: dict[str, Any] = {"stream": torch.cuda.Stream()} if cuda else {}
            module.set_all_reduce_hook(_mean_between_replicas(codec, replicate), **stream)


class _Comm:
    """What FSDP requires of a custom all-gather or reduce-scatter."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._nonces = itertools.count()  # all ranks make equally many calls, in one order

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _ReduceScatter(_Comm):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        mean = op == dist.ReduceOp.AVG
        reduce_scatter(
            input_tensor,
            codec=self._codec,
            op="mean" if mean else "sum",
            nonce=next(self._nonces),
            group=group,
            out=output_tensor,
        )
        if not mean and op != dist.ReduceOp.SUM:
            if op != dist.ReduceOp.PREMUL_SUM:
                raise ConfigError(f"fsdp.compress: gradients can be averaged or summed, got {op}")
            output_tensor.mul_(premultiplier(op))  # the factor of set_gradient_divide_factor


class _AllGather(_Comm):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> None:
        if not input_tensor.is_floating_point():
            raise ConfigError(
                "fsdp.compress: the weights of a module must have one floating-point dtype to be gathered through a "
                f"codec, got {input_tensor.dtype}: FSDP sends several as bytes; shard them apart, or give weights=None"
            )
        all_gather(input_tensor, codec=self._codec, nonce=next(self._nonces), group=group, out=output_tensor)


def _mean_between_replicas(codec: Codec | None, group: "ProcessGroup") -> Callable[[Tensor], None]:
    nonces = itertools.count()

    def hook(reduced: Tensor) -> None:
        all_reduce(reduced, codec=codec, op="mean", nonce=next(nonces), group=group)

    return hook


def _check_replicate_axis(model: nn.Module, replicate: "ProcessGroup | None") -> None:
    for name, param in model.named_parameters():
        # The axis of replicas is the first. A later one may belong to tensor parallelism.
        if not isinstance(param, DTensor) or not isinstance(param.placements[0], Replicate):
            continue
        backend = param.device_mesh.get_group(0)._get_backend(param.device)
        if replicate is not None or not isinstance(backend, CodecBackend):
            raise ConfigError(
                f"fsdp.compress: '{name}' is sharded over a mesh with a replicate axis, whose all-reduce FSDP makes "
                "itself; make the mesh with init_device_mesh(backend_override={'replicate': ('gossamer', "
                "gs.Options(codec=...))}) and leave out replicate=, or use fully_shard(mesh=mesh['shard']) and "
                "compress(replicate=mesh['replicate'].get_group())"
            )
