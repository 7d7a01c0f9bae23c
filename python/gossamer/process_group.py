"""gs.Options: a codec for a process group, so that whatever calls torch.distributed sends through it."""

from collections.abc import Sequence
from typing import Any

from gossamer import _C
from gossamer.codec import Codec, Delta
from gossamer.codec.base import settings_text
from gossamer.errors import ConfigError

#: DDP's buckets are larger, and metrics, norms and statistics smaller.
_MIN_BYTES = 64 << 10


class Options(_C.CodecOptions):
    """The codecs of one process group of the backend "gossamer".

    >>> dist.init_process_group("gossamer", pg_options=gs.Options(codec=gs.Int8()))

    Give it wherever torch takes the options of a group: `pg_options` of init_process_group() and new_group(),
    `backend_override` of init_device_mesh(). All ranks of the group must give equal options.

    Args:
        codec: encodes sums of float32, float64, float16 and bfloat16 tensors: all_reduce and reduce_scatter with SUM,
            AVG or PREMUL_SUM. None: sums are exact. Other dtypes and operations are always exact.
        gather_codec: encodes all_gather of these dtypes, such as FSDP2's parameters. None: it is exact.
        min_bytes: smaller tensors travel as they are. For reduce_scatter and all_gather the large tensor counts.
        hosts: the ranks of each host. The ranks of a host sum exactly among themselves, and the codec is used between
            hosts. None: the ranks of one machine, network namespace and user are a host. With one rank in each list,
            all ranks send to all.

    Raises:
        ConfigError: an argument of another type, a codec with error feedback, or a codec written in Python.
    """

    def __init__(
        self,
        codec: Codec | None = None,
        *,
        gather_codec: Codec | None = None,
        min_bytes: int = _MIN_BYTES,
        hosts: Sequence[Sequence[int]] | None = None,
    ) -> None:
        native = _native("codec", codec), _native("gather_codec", gather_codec)
        if not isinstance(min_bytes, int) or isinstance(min_bytes, bool) or min_bytes < 0:
            raise ConfigError(f"Options: min_bytes must be an integer of at least 0, got {min_bytes!r}")
        self.codec, self.gather_codec, self.min_bytes = codec, gather_codec, min_bytes
        self.hosts = None if hosts is None else _host_lists(hosts)
        super().__init__(*native, min_bytes, self.hosts, settings_text(self))


def _native(name: str, codec: Any) -> _C.CodecChoice | None:
    if codec is None:
        return None
    if isinstance(codec, Delta):
        raise ConfigError(
            f"Options: {name} must be a Codec or None, got {codec!r}: a process group does not know whose weights it "
            f"gathers; use gs.fsdp.compress(model, weights={codec!r})"
        )
    if not isinstance(codec, Codec):
        raise ConfigError(f"Options: {name} must be a Codec or None, got {codec!r}")
    if codec.feeds_back:
        raise ConfigError(
            f"Options: {name} must be a codec without error feedback, got {codec!r}: a process group does not know "
            "which parameter a tensor belongs to; use gs.DataParallel or gs.hooks for error feedback"
        )
    if codec.native is None:
        raise ConfigError(
            f"Options: {name} must be a native codec, got {codec!r}, which is written in Python; use gs.DataParallel "
            "or gs.hooks for it"
        )
    return codec.native


def _host_lists(hosts: Any) -> list[list[int]]:
    try:
        lists = [list(host) for host in hosts]
    except TypeError:
        lists = [[]]
    if not all(lists) or not all(isinstance(rank, int) for host in lists for rank in host):
        raise ConfigError(f"Options: hosts must be None or the ranks of each host, got {hosts!r}")
    return lists
