# `gossamer run --min-np M --max-np N`: workers live on while their group changes. command.py has the flags. driver.py
# notices workers that die, and forms groups. newcomers.py knows which workers get ready, slots.py where workers may
# run. board.py is what the driver and the workers read and write. process.py is a worker on this host; remote.py and
# far.py are the two ends of a worker on another host. The worker's side is gossamer/membership.py. Only run.py
# imports this.
"""Elastic runs of ``gossamer run``."""
