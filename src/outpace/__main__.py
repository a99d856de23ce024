"""`python -m outpace`: the command line where the package is not installed, only on the path."""

from outpace.cli import main

main()
