"""What every algorithm promises at the end of a training, whatever happened in it. Not a test file."""

import torch

from gossamer.comm import gather_numbers
from gossamer.engine.agree import checksum_of
from gossamer.engine.face import Face


def require_promised(wrapped: Face) -> None:
    """Ranks hold equal finite weights, bit for bit; if the algorithm lets them differ between steps, after consensus().

    All ranks of the wrapper call it.
    """
    engine = wrapped.engine
    if engine.algorithm.own_weights:
        wrapped.consensus()
    weights = list(engine.params.values())
    sums = [each for [each] in gather_numbers(wrapped.links.control, checksum_of(weights))]
    assert len(set(sums)) == 1, f"the weights of the ranks differ; their checksums are {sums}"
    finite = [torch.isfinite(each.float()).all() for each in weights if each.dtype.is_floating_point]
    assert all(finite), "a weight is not finite"
