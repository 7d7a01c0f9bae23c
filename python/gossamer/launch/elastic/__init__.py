# `gossamer run --min-np M --max-np N`: a driver whose workers live on while their group changes. command.py has the
# flags, driver.py decides, newcomers.py knows who gets ready, slots.py where workers may run; board.py is what they
# read; process.py is a worker here, remote.py and far.py are the two ends of one elsewhere. The worker's side is
# gossamer/membership.py. Nothing but launch/run.py imports this package.
"""Elastic runs of ``gossamer run``."""
