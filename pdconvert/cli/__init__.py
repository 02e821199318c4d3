"""The command line: one module per subcommand, errors and exit codes in `app`.

The modules here import only what `--help` needs; everything heavy is imported where a command runs.
"""

from pdconvert.cli.app import main

__all__ = ["main"]
