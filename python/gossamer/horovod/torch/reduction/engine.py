"""``EngineReduction``: gradients on Gossamer's engine, in flat buckets, with Horovod's factors.

``refusal_of`` says which requests the engine cannot serve; negotiated.py serves those.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gossamer import _C, config
from gossamer.algorithms import Algorithm, GradientAllReduce
from gossamer.comm import Flat, Hierarchical, connect_by_hosts, private_among, sums_by_hosts
from gossamer.engine import Engine, Rounds
from gossamer.errors import CommError, ConfigError
from gossamer.horovod.common import basics
from gossamer.horovod.common.exceptions import internal_errors
from gossamer.horovod.torch.compression import codec_of, has_codec
from gossamer.horovod.torch.operations.submission import Average, Sum
from gossamer.horovod.torch.reduction.request import Request
from gossamer.observe.stall import Limits

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def refusal_of(request: Request) -> str:
    """Returns why the engine cannot reduce these gradients; an empty string if it can.

    Ranks with equal requests get the same answer.
    """
    trained = sorted(request.trained)
    params = [request.params[index] for index in trained]
    if request.op not in (Average, Sum):
        return "op is neither Average nor Sum"
    if request.sparse_as_dense:
        return "sparse_as_dense is given"
    if not has_codec(request.compression):
        return "the compression is a script's own"
    if request.predivide != 1.0 and codec_of(request.compression) is not None:
        return "gradient_predivide_factor is given, and a compression"
    if not params:
        return "no parameter needs a gradient"
    if len({(param.device.type, param.device.index) for param in params}) > 1:
        return "the parameters are on several devices"
    if params[0].device.type not in ("cpu", "cuda"):
        return f"the parameters are on {params[0].device.type}"
    for index, param in zip(trained, params, strict=True):
        if param.dtype not in _DTYPES or hasattr(param, "device_mesh") or nn.parameter.is_lazy(param):
            return f"parameter {request.names[index]!r} is of a kind ({param.dtype}) that buckets do not hold"
    return ""


class EngineReduction(Rounds):
    """Reduces the gradients of a request. Collective over the ranks of its process set.

    Args:
        number: the optimizer's number, the same on all ranks.
        passes: how many backwards bring gradients before a step.
        order: indices of parameters in the order in which their gradients came on this rank.
    """

    def __init__(self, request: Request, number: int, *, passes: int, order: Sequence[int]) -> None:
        native, settings = request.process_set.native(), config.current()
        wanted = config.variables("HOROVOD_").get("HOROVOD_FUSION_THRESHOLD")
        size = max(1, int(wanted)) if wanted else settings.bucket_bytes
        session = basics.session_of("DistributedOptimizer")
        key = f"{session.key}/{request.process_set.process_set_id}/optimizer{number}"
        self._holder = _Holder(request)  # the engine holds its module weakly
        algorithm: Algorithm = _Reduction(request, native.size)
        with internal_errors(CommError, ConfigError):
            device = request.params[min(request.trained)].device
            comm, control = private_among(None, native.ranks, device, key=key)
            levels = Hierarchical() if sums_by_hosts(native) else Flat(host_memory=True)
            self._engine = Engine(
                self._holder,
                algorithm,
                comm=connect_by_hosts(levels, comm, control, overlap=True),
                control=control,
                bucket_bytes=size,
                first_bucket_bytes=min(size, settings.first_bucket_bytes),
                broadcast=False,
                stall=Limits(session.knobs.stall_warning_s, session.knobs.stall_shutdown_s),
            )
            super().__init__(self._engine)
            self.begin(passes, order)

    @property
    def buckets(self) -> list[_C.Bucket]:
        """The current buckets."""
        return self._engine.buckets

    def synchronize(self) -> None:
        """Waits for the reduced gradients. Raises HorovodInternalError on every rank if a reduction failed."""
        with internal_errors(CommError, ConfigError):
            self.end()

    def shadow(self) -> None:
        """Adds zeros to the other ranks' reductions until every rank does so."""
        with internal_errors(CommError, ConfigError):
            super().shadow()

    def abandon(self) -> None:
        """Completes a step that has begun, so that no rank waits for this one."""
        if self.under_way:
            self.synchronize()

    def close(self, *, crashed: bool = False) -> None:
        """Ends the engine; the gradients stay. Idempotent. ``crashed``: ranks that wait for this one get an error."""
        self._engine.close(crashed=crashed)


class _Holder(nn.Module):
    """Has the parameters under the script's names, which need not be valid for a module."""

    def __init__(self, request: Request) -> None:
        super().__init__()
        self._named = list(zip(request.names, request.params, strict=True))

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Any]]:
        """Yields all of them, in the order of the optimizer."""
        for name, param in self._named:
            yield prefix + name, param


class _Reduction(GradientAllReduce):
    """Sums gradients between two factors, rounded as in Horovod. With a codec: the mean or sum of decoded gradients.

    Args:
        size: number of ranks.
    """

    def __init__(self, request: Request, size: int) -> None:
        super().__init__(average=request.op == Average, codec=codec_of(request.compression))
        self.prescale = 1.0 / request.predivide
        self.postscale = request.predivide / (size if self.average else 1)
        self.groups = request.groups
        self._group_of = {
            request.names[index]: number for number, group in enumerate(request.groups) for index in group
        }

    def group_of(self, name: str, param: Tensor) -> Any:
        """Separates groups, so that each is reduced as soon as it is complete."""
        return self._group_of.get(name), super().group_of(name, param)

    def native_work(self, bucket: _C.Bucket) -> _C.BucketWork | None:
        """Returns the backend's sum where there is no codec."""
        if self.codec is not None:
            return super().native_work(bucket)
        return _C.ScaledAllReduce(*factors(self.prescale, self.postscale, bucket.dtype, bucket.device.type))


def factors(prescale: float, postscale: float, dtype: torch.dtype, device: str) -> tuple[float, float]:
    """Returns the factors before and after the sum that give Horovod's bits.

    On CUDA, Horovod rounds the factors for float16 to float16. Except for float16, whose exponent has little room, a
    power of two loses nothing, so it goes before the sum, into the pass that fills the bucket.
    """
    if dtype == torch.float16:
        if device == "cuda":
            prescale, postscale = (torch.tensor(each, dtype=dtype).item() for each in (prescale, postscale))
        return prescale, postscale
    if math.frexp(postscale)[0] == 0.5:
        return prescale * postscale, 1.0
    return prescale, postscale
