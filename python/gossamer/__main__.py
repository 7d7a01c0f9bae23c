"""`python -m gossamer`: the `gossamer` command, for launchers that start modules. launch/cli.py is all of it."""

import sys

from gossamer.launch.cli import main

if __name__ == "__main__":
    sys.exit(main())
