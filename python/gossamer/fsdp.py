"""Sends FSDP2's traffic through codecs: what fully_shard() gathers and scatters, and the all-reduce between replicas.

>>> fully_shard(model, mesh=mesh)
>>> gs.fsdp.compress(model, gs.Int8())

The shards stay exact, and so do the optimizer and its states. See docs/fsdp.md.
"""

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from gossamer._C import CodecBackend
from gossamer.codec import BF16, Codec, Delta, Int8
from gossamer.collectives import all_gather, all_reduce, reduce_scatter
from gossamer.errors import ConfigError
from gossamer.torch_private import gathers_for_backward, premultiplier, replicated_meshes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_GRADIENTS, _WEIGHTS = Int8(), BF16()


def compress(
    model: nn.Module,
    codec: Codec | None = _GRADIENTS,
    *,
    weights: Codec | Delta | None = _WEIGHTS,
    replicate: "ProcessGroup | None" = None,
) -> None:
    """Set the codecs of every module of `model` that fully_shard() has sharded. Call it before training.

    The gradients and weights have the bits of a mesh whose groups are made with gossamer.Options(codec,
    gather_codec=weights, min_bytes=0). The groups can have any backend.

    Args:
        codec: the codec of gradients, in the reduce-scatter and in the all-reduce between replicas. Each rank that
            sends rounds once, and sums are in float32. None keeps FSDP's own reduce-scatter and all-reduce. A replicate
            axis whose group has gossamer.Options keeps these options.
        weights: the codec of the all-gather before forward and backward. Layers compute with rounded weights; the
            optimizer steps exact shards. With a Delta, differences are sent. After loading other weights, call compress
            again: the next gather is then exact. None keeps FSDP's own all-gather.
        replicate: for a model that is sharded over the mesh of the shards alone: the ranks that hold the same shard of
            other replicas. Their mean is taken after the reduce-scatter. Leave it out for a mesh with a replicate axis.

    Raises:
        ConfigError: Nothing is sharded, all codecs are None, a codec has error feedback, whose memory would not be
            sharded, or `replicate` is given and the mesh has a replicate axis.
    """
    if codec is None and weights is None and replicate is None:
        raise ConfigError("fsdp.compress: give a codec for gradients or for weights, got None for both")
    for what, given in {"codec": codec, "weights": weights}.items():
        is_delta = what == "weights" and isinstance(given, Delta)
        if given is not None and not is_delta and (not isinstance(given, Codec) or given.feeds_back):
            raise ConfigError(
                f"fsdp.compress: {what} must be a Codec without error feedback, or None, got {given!r}"
            )
    if replicate is not None and not isinstance(replicate, dist.ProcessGroup):
        raise ConfigError(f"fsdp.compress: replicate must be a process group or None, got {replicate!r}")
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not modules:
        raise ConfigError("fsdp.compress: no module of the model is sharded; call fully_shard() first")
    if replicate is not None and any(map(replicated_meshes, modules)):
        raise ConfigError(
            "fsdp.compress: replicate= is for a model that is sharded over one axis, got one whose mesh has a "
            "replicate axis: FSDP itself takes the mean between its replicas; leave out replicate="
        )
    # FSDP has no stream for the hook if it knows of no replicas.
    cuda = any(param.is_cuda for param in model.parameters())
    for module in modules:
        if codec is not None:
            module.set_custom_reduce_scatter(_ReduceScatter(codec))  # type: ignore[arg-type]
            for mesh in replicated_meshes(module):
                mesh.replicate_process_group = _encoded(mesh.replicate_process_group, codec)
        if isinstance(weights, Delta):
            module.set_custom_all_gather(_GatherDifferences(weights.codec, module))  # type: ignore[arg-type]
        elif weights is not None:
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
        word, factor = _reduction(op)
        nonce = next(self._nonces)
        reduce_scatter(input_tensor, codec=self._codec, op=word, nonce=nonce, group=group, out=output_tensor)
        if factor != 1:
            output_tensor.mul_(factor)


class _AllGather(_Comm):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> None:
        _require_floats(input_tensor)
        all_gather(input_tensor, codec=self._codec, nonce=next(self._nonces), group=group, out=output_tensor)


class _GatherDifferences(_Comm):
    """See Delta. All ranks hold equal weights, which they change by what arrives."""

    def __init__(self, codec: Codec, module: nn.Module) -> None:
        super().__init__(codec)
        self._module = weakref.ref(module)
        self._held: Tensor | None = None  # [ranks, elements of a shard], as gathered last
        self._written: torch.Event | None = None  # FSDP's streams may differ between forward and backward

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> None:
        _require_floats(input_tensor)
        if self._written is not None:
            self._written.wait()
        held = self._held
        if held is None or (held.dtype, held.size(1)) != (input_tensor.dtype, input_tensor.numel()):
            all_gather(input_tensor, group=group, out=output_tensor)
            self._held = output_tensor.view(-1, input_tensor.numel()).clone()
        else:
            module = self._module()
            if module is None or not gathers_for_backward(module):
                difference = input_tensor - held[group.rank()]
                arrived = all_gather(difference, codec=self._codec, nonce=next(self._nonces), group=group)
                held.add_(arrived.view_as(held))
            output_tensor.copy_(held.view_as(output_tensor))
        if input_tensor.is_cuda:
            self._written = torch.Event(input_tensor.device)
            self._written.record()


def _require_floats(weights: Tensor) -> None:
    if not weights.is_floating_point():
        raise ConfigError(
            "fsdp.compress: the weights of a module must have one floating-point dtype to be gathered through a "
            f"codec, got {weights.dtype}: FSDP sends several as bytes; shard them apart, or give weights=None"
        )


def _mean_between_replicas(codec: Codec | None, group: "ProcessGroup") -> Callable[[Tensor], None]:
    nonces = itertools.count()

    def hook(reduced: Tensor) -> None:
        all_reduce(reduced, codec=codec, op="mean", nonce=next(nonces), group=group)

    return hook


class _Replicas(dist.ProcessGroup):
    """Stands for the group of a replicate axis. FSDP calls nothing of it but all_reduce and size."""

    def __init__(self, group: "ProcessGroup", codec: Codec) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        self.group, self._codec, self._nonces = group, codec, itertools.count()

    def allreduce(self, tensors: list[Tensor], opts: Any) -> None:  # type: ignore[override]
        (reduced,) = tensors
        op, factor = _reduction(opts.reduceOp)
        all_reduce(reduced, codec=self._codec, op=op, nonce=next(self._nonces), group=self.group)
        if factor != 1:
            reduced.mul_(factor)


def _encoded(group: "ProcessGroup", codec: Codec) -> "ProcessGroup":
    if isinstance(group, _Replicas):
        group = group.group  # of an earlier compress()
    has_options = any(isinstance(group._get_backend(device), CodecBackend) for device in group._device_types)
    return group if has_options else _Replicas(group, codec)


def _reduction(op: Any) -> tuple[str, float]:
    """Return the word for gossamer's collectives, and the factor that is still to be applied."""
    if op == dist.ReduceOp.AVG:
        return "mean", 1.0
    if op == dist.ReduceOp.PREMUL_SUM:
        return "sum", premultiplier(op)  # of set_gradient_divide_factor
    if op != dist.ReduceOp.SUM:
        raise ConfigError(f"fsdp.compress: gradients can be averaged or summed, got {op}")
    return "sum", 1.0
