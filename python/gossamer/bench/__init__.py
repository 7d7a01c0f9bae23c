"""`gossamer bench`: what this machine and its network give, measured by the package itself. Start at cli.py."""
