# gs.elastic: training that goes on while workers die and come. loop.py is what the user's loop iterates over, and
# decides at the boundary of two steps. survival.py heals a backward whose group has lost a member, and lets newcomers
# in. Who is in a group is decided elsewhere: gossamer/membership.py, launch/elastic.
"""``gs.elastic``: a plain loop that survives its workers."""

from gossamer.regroup.loop import Elastic, elastic

__all__ = ["Elastic", "elastic"]
