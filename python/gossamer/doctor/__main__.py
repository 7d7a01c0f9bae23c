"""`python -m gossamer.doctor`: `gossamer doctor` for launchers that start modules. cli.py is all of it."""

import sys

from gossamer.launch.cli import main

if __name__ == "__main__":
    sys.exit(main(["doctor", *sys.argv[1:]]))
