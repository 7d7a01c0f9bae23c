"""``stand_in("horovod", ...)``: from then on `horovod.x` is `gossamer.horovod.x`, one module under both names.

The packages in launch/alias call it, which a script under `gossamer run --as-horovod` or `--as-bagua` finds.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType


def stand_in(name: str, has: str) -> None:
    """Makes ``import <name>`` import ``gossamer.<name>``, and so for each module of the package.

    Args:
        has: the parts of the package that exist, for the error of an import of another part.
    """
    sys.meta_path.insert(0, _Alias(name, has))
    # The import that runs the calling file takes the module under its name when the file has run.
    sys.modules[name] = importlib.import_module(f"gossamer.{name}")


class _Alias(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds name.x as gossamer.name.x."""

    def __init__(self, name: str, has: str) -> None:
        self._name, self._has = name, has
        self._specs: dict[str, importlib.machinery.ModuleSpec | None] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != self._name:
            return None
        found = importlib.util.find_spec(f"gossamer.{fullname}")
        if found is None:
            raise ModuleNotFoundError(
                f"{fullname} does not exist under `gossamer run --as-{self._name}`, which has {self._has}",
                name=fullname,
            )
        package = found.submodule_search_locations is not None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=package)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(f"gossamer.{spec.name}")
        self._specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = self._specs.pop(module.__spec__.name)  # this import has just overwritten it
