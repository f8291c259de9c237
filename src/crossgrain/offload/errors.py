"""What goes wrong in offloading."""


class OffloadError(RuntimeError):
    """Bytes could not be stored or read. Its cause is the error of the operating system, if there was one."""


class OverLimitError(OffloadError):
    """More than ``limit_bytes``."""
