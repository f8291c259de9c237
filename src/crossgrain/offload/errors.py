"""The exceptions of offloading."""


class OffloadError(RuntimeError):
    """A tensor could not be stored or read back. ``__cause__`` is the operating system's error, if any."""


class OverLimitError(OffloadError):
    """Storing a tensor would use more than ``limit_bytes``."""
