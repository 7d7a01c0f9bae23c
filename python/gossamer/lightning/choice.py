"""What the strategies of the Trainer and of Fabric are given, and how models are wrapped with it.

Arguments alone: the two classes that have them are in native.py and fabric_strategy.py.
"""

from datetime import timedelta
from typing import Any, ClassVar

from torch.distributed.constants import default_pg_timeout

from gossamer.algorithms import ALGORITHMS, Algorithm, resolve
from gossamer.comm import Flat, Hierarchical
from gossamer.data_parallel import DataParallel
from gossamer.engine import Autotune
from gossamer.errors import ConfigError
from gossamer.lightning.namespaces import Base


class Choice:
    """The algorithm that a strategy was given, and how models are wrapped with it.

    Args:
        algorithm: an Algorithm, or its name.
        arguments: of the class of that name.
        options: of DataParallel.
        hierarchical: None: sums go by hosts where ranks share hosts; True, False: they do, they do not.
    """

    def __init__(
        self,
        algorithm: str | Algorithm,
        arguments: dict[str, Any],
        options: dict[str, Any],
        hierarchical: bool | None,
    ) -> None:
        if arguments and not (isinstance(algorithm, str) and algorithm in ALGORITHMS):
            raise ConfigError(
                f"GossamerStrategy: arguments of an algorithm need its name, one of {', '.join(sorted(ALGORITHMS))}, "
                f"got {algorithm!r} and {arguments}"
            )
        self._algorithm, self._arguments = algorithm, arguments
        self._options, self._hierarchical = options, hierarchical
        self._make()  # refuses wrong arguments here, and not in the workers

    def wrap(self, module: Any, optimizers: Any) -> DataParallel:
        """Collective."""
        group = {None: None, True: Hierarchical(), False: Flat()}[self._hierarchical]
        return DataParallel(module, optimizers, algorithm=self._make(), process_group=group, **self._options)

    def _make(self) -> Algorithm:
        if isinstance(self._algorithm, str) and self._arguments:
            return ALGORITHMS[self._algorithm](**self._arguments)
        return resolve(self._algorithm)


class Chosen(Base):
    """A mixin over one of Lightning's DDPStrategies.

    Args:
        algorithm: an Algorithm, or its name, such as "bytegrad".
        accelerator, parallel_devices, cluster_environment, checkpoint_io, process_group_backend, timeout, start_method:
            as of Lightning's DDPStrategy. The backend is "gossamer" for CPUs by default, and "cpu:gossamer,cuda:nccl"
            for GPUs.
        bucket_bytes, first_bucket_bytes, autotune: as of gossamer.DataParallel.
        hierarchical: whether gradients are exact inside hosts, and compressed between them: True is
            gossamer.Hierarchical(), False gossamer.Flat(). None: where ranks share hosts.
        algorithm_kwargs: arguments of the algorithm of that name; and Lightning's `precision_plugin`, or in Fabric
            `precision`.

    Raises:
        ConfigError: an unknown algorithm, or arguments with an Algorithm.
        TypeError: arguments that the algorithm does not have.
    """

    precision_argument: ClassVar[str]  # what Lightning calls it

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
        self._take_precision(algorithm_kwargs)
        options = {
            "bucket_bytes": bucket_bytes,
            "first_bucket_bytes": first_bucket_bytes,
            "autotune": autotune,
        }
        self._choice = Choice(algorithm, algorithm_kwargs, options, hierarchical)

    def _take_precision(self, arguments: dict[str, Any]) -> None:
        # Not in __init__: LightningCLI reads there what becomes of keyword arguments.
        if self.precision_argument in arguments:
            setattr(self, self.precision_argument, arguments.pop(self.precision_argument))
