"""`python -m outpace.cli`."""

from outpace.cli import main

main()
