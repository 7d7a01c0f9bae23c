"""The two packages that Lightning is published as, and which of them are installed.

`lightning` and `pytorch_lightning` have separate classes, and each rejects the other's strategies. So subclass() makes
every class of this face once for each package.
"""

import importlib
import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    Base = Any
else:
    Base = object


@dataclass(frozen=True)
class Namespace:
    """One of the two packages."""

    trainer: str  # the package with Trainer
    fabric: str  # the package with Fabric

    def of_trainer(self, module: str) -> Any:
        """Import a module of the Trainer's package."""
        return importlib.import_module(f"{self.trainer}.{module}")

    def of_fabric(self, module: str) -> Any:
        """Import a module of Fabric's package."""
        return importlib.import_module(f"{self.fabric}.{module}")


LIGHTNING = Namespace("lightning.pytorch", "lightning.fabric")
PYTORCH_LIGHTNING = Namespace("pytorch_lightning", "lightning_fabric")


def installed() -> list[Namespace]:
    """Return the packages that can be imported.

    Raises:
        ImportError: There is none.
    """
    found = [
        each
        for each in (LIGHTNING, PYTORCH_LIGHTNING)
        if importlib.util.find_spec(each.trainer.partition(".")[0]) is not None
    ]
    if not found:
        raise ImportError(
            "gossamer.lightning: needs the package lightning or pytorch-lightning, 2.6.4 or newer, and neither is "
            "installed; run `pip install 'gossamer[lightning]'`"
        )
    return found


def subclass(mixin: type, base: type, *, module: str, extra: dict[str, Any] | None = None) -> Any:
    """Make the class of a mixin for one package.

    Args:
        module: the module that will hold the class, as pickle needs it.
        extra: more attributes of the class.
    """
    name = mixin.__name__
    return type(name, (mixin, base), {"__module__": module, "__doc__": mixin.__doc__, **(extra or {})})
