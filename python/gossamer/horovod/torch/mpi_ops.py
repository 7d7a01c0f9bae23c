"""The names of ``horovod.torch.mpi_ops``, gathered: Horovod's torch part without the optimizer and the helpers."""

from gossamer.horovod.common.basics import *  # noqa: F403
from gossamer.horovod.common.built import *  # noqa: F403
from gossamer.horovod.common.exceptions import HorovodInternalError as HorovodInternalError
from gossamer.horovod.common.process_sets import *  # noqa: F403
from gossamer.horovod.torch.compression import Compression as Compression
from gossamer.horovod.torch.operations.asynchronous import *  # noqa: F403
from gossamer.horovod.torch.operations.collectives import *  # noqa: F403
from gossamer.horovod.torch.operations.gradients import *  # noqa: F403
from gossamer.horovod.torch.operations.handles import *  # noqa: F403
from gossamer.horovod.torch.operations.joining import *  # noqa: F403
from gossamer.horovod.torch.operations.submission import *  # noqa: F403
