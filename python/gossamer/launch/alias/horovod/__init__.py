# The name `horovod` for a script under `gossamer run --as-horovod`: worker.py puts the folder above on sys.path, so
# that multiprocessing's spawned children find it too. It is no module of its own: once imported, `horovod` is
# gossamer.horovod, and each of its modules is the one module under both names.
"""``horovod``, which is ``gossamer.horovod``."""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType

HERE = "horovod.torch, horovod.torch.elastic, horovod.common and horovod.run"


class _Alias(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds horovod.x as gossamer.horovod.x."""

    def __init__(self) -> None:
        self._specs: dict[str, importlib.machinery.ModuleSpec | None] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != "horovod":
            return None
        found = importlib.util.find_spec(f"gossamer.{fullname}")
        if found is None:
            raise ModuleNotFoundError(
                f"{fullname} does not exist under `gossamer run --as-horovod`, which has PyTorch alone: {HERE}",
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
        module.__spec__ = self._specs.pop(module.__spec__.name)  # which this import has just overwritten


sys.meta_path.insert(0, _Alias())
# The import that runs this file takes what stands under its name at the end.
sys.modules[__name__] = importlib.import_module("gossamer.horovod")
