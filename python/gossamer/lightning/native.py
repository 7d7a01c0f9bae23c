"""GossamerStrategy of the Trainer: a LightningModule in gossamer.DataParallel. See gossamer.lightning.pytorch.

Fabric's class, in fabric_strategy.py, takes the same arguments and wraps models in the same way, by the mixin Chosen.
"""

from datetime import timedelta
from typing import Any, ClassVar

from torch.distributed.constants import default_pg_timeout

from gossamer.algorithms import ALGORITHMS, Algorithm, Sharded, resolve
from gossamer.comm import Flat, Hierarchical
from gossamer.data_parallel import DataParallel
from gossamer.engine import Autotune
from gossamer.errors import ConfigError
from gossamer.lightning.namespaces import Base
from gossamer.lightning.trainer import Wrapping


class Chosen(Base):
    """A mixin over one of Lightning's DDPStrategy classes.

    Args:
        algorithm: an Algorithm, or its name, such as "bytegrad".
        accelerator, parallel_devices, cluster_environment, checkpoint_io, process_group_backend, timeout, start_method:
            as in Lightning's DDPStrategy. The default backend is "gossamer" for CPUs and "cpu:gossamer,cuda:nccl" for
            GPUs.
        bucket_bytes, first_bucket_bytes, autotune: as in gossamer.DataParallel.
        hierarchical: whether gradients are exact inside hosts, and compressed between them. True is
            gossamer.Hierarchical(), False is one level; None: hierarchical where ranks share hosts. In each case
            GPUs of a host without peer access sum through its memory.
        algorithm_kwargs: arguments of the named algorithm; also Lightning's `precision_plugin`, in Fabric `precision`.

    Raises:
        ConfigError: The algorithm is unknown, or arguments are given with an Algorithm.
        TypeError: The algorithm does not have one of the arguments.
    """

    precision_argument: ClassVar[str]  # Lightning's name for the precision

    def __init__(
        self,
        algorithm: str | Algorithm = "gradient_allreduce",
        *,
        accelerator: Any = None,
        parallel_devices: Any = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        start_method: str = "popen",
        bucket_bytes: int | None = None,
        first_bucket_bytes: int | None = None,
        autotune: bool | Autotune = False,
        hierarchical: bool | None = None,
        **algorithm_kwargs: Any,
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self._options: dict[str, Any] = {
            "bucket_bytes": bucket_bytes,
            "first_bucket_bytes": first_bucket_bytes,
            "autotune": autotune,
            "process_group": {None: None, True: Hierarchical(), False: Flat(host_memory=True)}[hierarchical],
        }
        self._choose(algorithm, algorithm_kwargs)

    def _choose(self, algorithm: str | Algorithm, arguments: dict[str, Any]) -> None:
        # Not in __init__, which LightningCLI reads to see where keyword arguments go.
        if self.precision_argument in arguments:
            setattr(self, self.precision_argument, arguments.pop(self.precision_argument))
        if arguments.pop("elastic", False):
            raise ConfigError(
                "GossamerStrategy: elastic=True is refused, because Lightning's loop draws the batches and cannot "
                "divide the rest of an epoch anew when the group changes; write the loop with gs.elastic, as "
                "docs/elastic.md does"
            )
        if arguments and not (isinstance(algorithm, str) and algorithm in ALGORITHMS):
            raise ConfigError(
                f"GossamerStrategy: arguments of an algorithm need its name, one of {', '.join(sorted(ALGORITHMS))}, "
                f"got {algorithm!r} and {arguments}"
            )
        self._algorithm, self._arguments = algorithm, arguments
        if isinstance(self._made(), Sharded):  # and raises for wrong arguments here, not in the workers
            raise ConfigError(
                "GossamerStrategy: Sharded is refused, because Lightning clips gradients and saves optimizers as if "
                "each rank had all of them; wrap the model in gs.DataParallel, in a loop of your own"
            )

    def _made(self) -> Algorithm:
        if isinstance(self._algorithm, str) and self._arguments:
            return ALGORITHMS[self._algorithm](**self._arguments)
        return resolve(self._algorithm)

    def _wrapped(self, module: Any, optimizers: Any) -> DataParallel:
        return DataParallel(module, optimizers, algorithm=self._made(), **self._options)


class GossamerStrategy(Chosen, Wrapping):
    """Trains with one of Gossamer's algorithms, on CPUs or GPUs, with one process for each device.

    The arguments are those of Chosen.
    """

    precision_argument = "precision_plugin"

    def wrap(self, model: Any) -> DataParallel:
        return self._wrapped(model, self.optimizers)
