"""``python -m quarot``: the command line."""

import sys

from quarot.cli import main

if __name__ == "__main__":
    sys.exit(main())
