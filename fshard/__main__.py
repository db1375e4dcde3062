"""`python -m fshard COMMAND ...`: the same as the command `fshard`."""

import sys

from fshard_command import main

if __name__ == "__main__":
    sys.exit(main())
