"""``python -m crossgrain``: the command line."""

from crossgrain_command import main

main()
