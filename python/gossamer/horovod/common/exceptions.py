"""The exceptions that Horovod scripts catch, and how Gossamer's own become these.

An error that ends a wait is a HorovodInternalError; an argument that is wrong at the call is a ValueError.
"""

import contextlib
from collections.abc import Iterator


class HorovodInternalError(RuntimeError):
    """An operation failed on every rank, or the ranks have lost each other. Elastic training restores its state."""


class HostsUpdatedInterrupt(Exception):  # noqa: N818  (Horovod's name)
    """Workers were added or removed. A commit raises it, and training goes on in the new group.

    ``skip_sync``: the states need not be synchronised, because workers only left.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__(f"the set of workers has changed (skip_sync={skip_sync})")
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """Exists for scripts that name it. It is never raised, because the native core is checked when it is loaded."""

    def __init__(self, name: str = "", version: str = "", installed_version: str = "") -> None:
        super().__init__(f"{name} was built with version {version}, and {installed_version} is installed")
        self.name: str = name
        self.version = version
        self.installed_version = installed_version


@contextlib.contextmanager
def internal_errors(*kinds: type[Exception]) -> Iterator[None]:
    """Within it, an error of these kinds becomes a HorovodInternalError."""
    try:
        yield
    except kinds as error:
        raise HorovodInternalError(str(error)) from error
