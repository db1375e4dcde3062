"""The command `fshard`. It is outside the package, of which every import imports torch first: Ctrl-C may come then."""

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status; Ctrl-C, also while torch is imported, is one line and status 130."""
    try:
        from fshard.cli.main import main as run

        return run(argv)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
