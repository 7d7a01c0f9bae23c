"""The strategy for `lightning.fabric`. Importing this registers its names."""

from gossamer.lightning.names import for_fabric
from gossamer.lightning.namespaces import LIGHTNING

GossamerStrategy = for_fabric(LIGHTNING, __name__)
