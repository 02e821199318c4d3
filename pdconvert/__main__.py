"""`python -m pdconvert` is the `pdconvert` command."""

from pdconvert.cli import main

main(prog_name="pdconvert")
