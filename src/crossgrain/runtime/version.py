"""The version of crossgrain, for files that say what has written them; also if the package is not installed."""

PACKAGE_VERSION = "0.1.0"
