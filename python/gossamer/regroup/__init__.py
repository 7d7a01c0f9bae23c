# gs.elastic: training that goes on while workers die and come. loop.py is what the user's loop iterates over, and
# decides at the boundary of two steps. survival.py carries the training into the next group, and lets newcomers in;
# gradients.py heals a backward whose group has lost a member, in_step.py with consensus.py and sharded.py a step of the
# optimizer, averaging.py, peers.py and asynchronous.py an averaging. Who is in a group is decided elsewhere:
# gossamer/membership.py, launch/elastic.
"""``gs.elastic``: a plain loop that survives its workers."""

from gossamer.regroup.loop import Elastic, elastic

__all__ = ["Elastic", "elastic"]
