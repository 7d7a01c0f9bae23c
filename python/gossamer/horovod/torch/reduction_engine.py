# Gradients that ride on Gossamer's engine: in flat buckets, by the algorithm below, with Horovod's factors. What can
# ride and what cannot is decided in reduction.py; the other way is reduction_negotiated.py.
"""``EngineReduction``."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gossamer import _C, config
from gossamer.algorithms import Algorithm, GradientAllReduce
from gossamer.codec import Adaptive, Codec
from gossamer.comm import Flat, Hierarchical, connect_by_hosts, private_among, sums_by_hosts
from gossamer.engine import Engine, Rounds
from gossamer.errors import CommError, ConfigError
from gossamer.horovod.common import basics
from gossamer.horovod.common.exceptions import HorovodInternalError
from gossamer.horovod.torch.compression import codec_of, has_codec
from gossamer.horovod.torch.optimizer_arguments import Request
from gossamer.horovod.torch.submission import Average, Sum

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def refusal_of(request: Request) -> str:
    """Why such gradients cannot ride, the same on ranks with equal requests; empty if they can."""
    params = [request.params[index] for index in sorted(request.trained)]
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
    for index in sorted(request.trained):
        param = request.params[index]
        if param.dtype not in _DTYPES or hasattr(param, "device_mesh") or nn.parameter.is_lazy(param):
            return f"parameter {request.names[index]!r} is of a kind ({param.dtype}) that buckets do not hold"
    return ""


class EngineReduction:
    """Reduces the gradients of a request. Collective over the ranks of its process set.

    Args:
        key: equal on these ranks, and never used before in this group.
        passes: see Rounds.
        order: indices of parameters in the order in which their gradients came here.
        bucket_bytes: of a bucket; None is gossamer.config's.
    """

    def __init__(
        self, request: Request, *, key: str, passes: int, order: Sequence[int], bucket_bytes: int | None
    ) -> None:
        ranks, settings = request.process_set.ranks, config.current()
        assert ranks is not None
        size = settings.bucket_bytes if bucket_bytes is None else max(1, bucket_bytes)
        self._holder = _Holder(request)
        algorithm: Algorithm = _Reduction(request, len(ranks))
        with _errors():
            comm, control = private_among(None, ranks, request.params[min(request.trained)].device, key=key)
            levels = Hierarchical() if sums_by_hosts(request.process_set.native()) else Flat()
            comm = connect_by_hosts(levels, comm, control)
            self._engine = Engine(
                self._holder,
                algorithm,
                comm=comm,
                control=control,
                bucket_bytes=size,
                first_bucket_bytes=min(size, settings.first_bucket_bytes),
                broadcast=False,
                stall=basics.stall_limits(),
            )
            self._rounds = Rounds(self._engine)
            self._rounds.begin(passes, order)

    @property
    def under_way(self) -> bool:
        """Whether a parameter has all its gradients, and may be travelling."""
        return self._rounds.under_way

    @property
    def buckets(self) -> list[_C.Bucket]:
        """The buckets as they are now."""
        return self._engine.buckets

    def set_passes(self, passes: int) -> None:
        """Every parameter that is not complete waits for so many gradients from now on."""
        self._rounds.set_passes(passes)

    def synchronize(self) -> None:
        """Every parameter has the reduced gradient afterwards. HorovodInternalError: on every rank, if one failed."""
        with _errors():
            self._rounds.end()

    def shadow(self) -> None:
        """Adds zeros to what the others reduce until every rank does so."""
        with _errors():
            self._rounds.shadow()

    def abandon(self) -> None:
        """Completes what has begun, so that no rank waits for this one."""
        if self.under_way:
            self.synchronize()

    def close(self, *, crashed: bool = False) -> None:
        """Ends it; the gradients stay. Idempotent. crashed: ranks that wait for this one get an error soon."""
        self._engine.close(crashed=crashed)


class _Holder(nn.Module):
    """The parameters under the names that the script gave, whatever characters are in them."""

    def __init__(self, request: Request) -> None:
        super().__init__()
        self._named = list(zip(request.names, request.params, strict=True))

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Any]]:
        """All of them, in the order of the optimizer."""
        for name, param in self._named:
            yield prefix + name, param


class _Reduction(GradientAllReduce):
    """The sum of gradients between two factors, as Horovod rounds it; by a codec the mean or sum of what is decoded.

    Args:
        size: number of ranks.
    """

    def __init__(self, request: Request, size: int) -> None:
        codec: Codec | Adaptive | None = codec_of(request.compression)
        super().__init__(average=request.op == Average, codec=codec)
        self.prescale = 1.0 / request.predivide
        self.postscale = request.predivide / (size if self.average else 1)
        self.groups = request.groups
        self._group_of = {
            request.names[index]: number for number, group in enumerate(request.groups) for index in group
        }

    def group_of(self, name: str, param: Tensor) -> Any:
        """Groups travel apart, so that each is reduced as soon as all of it is there."""
        return self._group_of.get(name), super().group_of(name, param)

    def native_work(self, bucket: _C.Bucket) -> _C.BucketWork | None:
        """The backend's sum, where no codec is asked for."""
        if self.codec is not None:
            return super().native_work(bucket)
        return _C.ScaledAllReduce(*factors(self.prescale, self.postscale, bucket.dtype, bucket.device.type))


def factors(prescale: float, postscale: float, dtype: torch.dtype, device: str) -> tuple[float, float]:
    """The factors before and after the sum that give Horovod's bits.

    On CUDA, Horovod rounds factors to float16 for float16. A power of two loses nothing where the exponent has room, so
    it goes before the sum, into the pass that fills the bucket.
    """
    if dtype == torch.float16:
        if device == "cuda":
            prescale, postscale = (torch.tensor(each, dtype=dtype).item() for each in (prescale, postscale))
        return prescale, postscale
    if math.frexp(postscale)[0] == 0.5:
        return prescale * postscale, 1.0
    return prescale, postscale


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Within it, what ends or fails on every rank is Horovod's error."""
    try:
        yield
    except (CommError, ConfigError) as error:
        raise HorovodInternalError(str(error)) from error
