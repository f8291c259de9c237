"""The version that clients are told."""

VERSION = "2.20.0+crossgrain"
"""That of the interface which is served: clients take the paths they have for it. The local part says by whom."""
