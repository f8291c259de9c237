"""The one error of the emulator."""


class PtxError(Exception):
    """A program does what PTX forbids or leaves open, or what this emulator does not know."""
