"""`python -m fedshift` is the command line."""

from fedshift.cli import main

main()
