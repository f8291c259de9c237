"""The version number that programs which ask for Transformer Engine's version get."""

VERSION = "2.20.0+crossgrain"
"""Version of Transformer Engine's interface that crossgrain has. The local part ``+crossgrain`` tells them apart."""
