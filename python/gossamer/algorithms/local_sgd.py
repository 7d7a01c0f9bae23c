"""Local SGD: every rank trains alone for some steps, then all take the mean of their weights; with an outer optimizer,
DiLoCo.

Stich 2018, arXiv:1805.09767; DiLoCo: Douillard et al. 2023, arXiv:2311.08105; its streaming form: Douillard et al. 2025,
arXiv:2501.18512. Between synchronisations ranks hold different weights: model.consensus() averages them exactly.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer.algorithms.base import Algorithm
from gossamer.codec import Codec, ErrorFeedback
from gossamer.collectives import all_reduce
from gossamer.comm import Communicator
from gossamer.errors import ConfigError

OuterOptimizer = Callable[[list[Tensor]], torch.optim.Optimizer]


class LocalSGD(Algorithm):
    """Every `period` steps: anchor <- outer(anchor, mean of (anchor - x)); x <- anchor. Without `outer_optimizer`, the mean
    of x.

    Args:
        period: optimizer steps between two synchronisations of a parameter (H).
        outer_optimizer: makes an optimizer of a list of tensors; it sees the mean change as their gradient. DiLoCo's is
            functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True). Elementwise optimizers only.
        codec: what the changes travel in, such as ErrorFeedback(Int4()).
        fragments: the buckets are dealt out to so many fragments, which are synchronised one after the other within a
            period: the same bytes in smaller portions.
        delay: steps that a fragment's mean may take to arrive; training goes on meanwhile.
        merge: share of the arrived weights, (0, 1]; the rest is what the rank has by then. 1 forgets the steps of the
            delay, 0.5 is streaming DiLoCo's.
    """

    name = "local_sgd"
    fields = ("weight",)
    state_fields = ("anchor", "error", "change")
    needs_optimizer = True
