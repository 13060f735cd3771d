"""`python -m shoal.cli`: the `shoal` command."""

from . import main

main()
