"""Horovod's ``basics``, ``process_sets``, ``exceptions``, ``elastic`` and ``util``, and the session behind them."""
