"""The strategy for `lightning_fabric`. Importing this registers its names."""

from gossamer.lightning.names import for_fabric
from gossamer.lightning.namespaces import PYTORCH_LIGHTNING

GossamerStrategy = for_fabric(PYTORCH_LIGHTNING, __name__)
