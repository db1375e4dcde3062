"""`python -m fshard COMMAND ...`: the same as the command `fshard`."""

import sys

from .cli.main import main

if __name__ == "__main__":
    sys.exit(main())
