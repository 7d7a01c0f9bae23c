"""The arguments that both GossamerStrategy classes take, and how a model is wrapped with them.

native.py has the class for the Trainer, fabric_strategy.py the class for Fabric.
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
    """Wraps models with the algorithm that a strategy was given.

    Args:
        algorithm: an Algorithm, or its name.
        arguments: arguments of the algorithm's class; only with a name.
        options: arguments of DataParallel.
        hierarchical: whether sums go by hosts; None: they do where ranks share hosts.

    Raises:
        ConfigError: The algorithm is unknown, or arguments are given with an Algorithm.
        TypeError: The algorithm does not have one of the arguments.
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
        self._make()  # raises for wrong arguments here, and not in the workers

    def wrap(self, module: Any, optimizers: Any) -> DataParallel:
        """Return the module in a DataParallel. Collective."""
        group = {None: None, True: Hierarchical(), False: Flat()}[self._hierarchical]
        return DataParallel(module, optimizers, algorithm=self._make(), process_group=group, **self._options)

    def _make(self) -> Algorithm:
        if isinstance(self._algorithm, str) and self._arguments:
            return ALGORITHMS[self._algorithm](**self._arguments)
        return resolve(self._algorithm)


class Chosen(Base):
    """A mixin over one of Lightning's DDPStrategy classes.

    Args:
        algorithm: an Algorithm, or its name, such as "bytegrad".
        accelerator, parallel_devices, cluster_environment, checkpoint_io, process_group_backend, timeout, start_method:
            as in Lightning's DDPStrategy. The default backend is "gossamer" for CPUs and "cpu:gossamer,cuda:nccl" for
            GPUs.
        bucket_bytes, first_bucket_bytes, autotune: as in gossamer.DataParallel.
        hierarchical: whether gradients are exact inside hosts, and compressed between them. True is
            gossamer.Hierarchical(), False is gossamer.Flat(); None: hierarchical where ranks share hosts.
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
        self._take_precision(algorithm_kwargs)
        options = {
            "bucket_bytes": bucket_bytes,
            "first_bucket_bytes": first_bucket_bytes,
            "autotune": autotune,
        }
        self._choice = Choice(algorithm, algorithm_kwargs, options, hierarchical)

    def _take_precision(self, arguments: dict[str, Any]) -> None:
        # Not in __init__, which LightningCLI reads to see where keyword arguments go.
        if self.precision_argument in arguments:
            setattr(self, self.precision_argument, arguments.pop(self.precision_argument))
