"""``python -m crossgrain``: the command line."""

from .cli import main

main()
