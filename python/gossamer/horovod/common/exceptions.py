# The exceptions of horovod.common.exceptions under their names. Gossamer's own (gossamer.errors) become these at the
# face's border: what ends in `wait` is a HorovodInternalError, what is wrong at the call a ValueError.
"""Exceptions that Horovod scripts catch."""


class HorovodInternalError(RuntimeError):
    """An operation failed on every rank, or the ranks have lost each other. Elastic training restores on it."""


class HostsUpdatedInterrupt(Exception):  # noqa: N818  (Horovod's name)
    """Workers were added or removed: raised at a commit, so that training goes on in the new group.

    ``skip_sync``: the states need not be synchronised, because workers only left.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__(f"the set of workers has changed (skip_sync={skip_sync})")
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """Kept for scripts that name it; never raised, since the native core is checked when it is loaded."""

    def __init__(self, name: str = "", version: str = "", installed_version: str = "") -> None:
        super().__init__(f"{name} was built with version {version}, and {installed_version} is installed")
        self.name = name
        self.version = version
        self.installed_version = installed_version
