# The `gossamer` command. cli.py is the table of subcommands, one module each; worker.py is what `run`
# starts in every worker. Nothing else of Gossamer imports this package.
"""The ``gossamer`` command."""
