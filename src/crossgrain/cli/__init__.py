"""The commands of the ``crossgrain`` program, one file each. ``crossgrain_command.app`` lists them."""
