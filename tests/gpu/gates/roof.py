"""How fast a kernel can be at most, by its instructions, its bytes and published figures. Nothing is measured.

A kernel takes the longer of two times: that of its bytes through memory, and that of its instructions through the
schedulers. Both are taken with a share of the published peak that kernels of this kind reach at most.
"""

from dataclasses import dataclass

MEMORY_SHARE = 0.92  # of the published bandwidth
ISSUE_SHARE = 0.6  # of all slots for instructions: waiting for memory and for results takes the rest


@dataclass(frozen=True)
class Gpu:
    """A GPU by its published figures.

    Attributes:
        name: its name.
        target: what kernels are compiled for.
        bandwidth: bytes per second.
        units: multiprocessors, or compute units.
        lanes: threads of each whose next instruction can begin in a cycle.
        clock: cycles per second (boost).
    """

    name: str
    target: str
    bandwidth: float
    units: int
    lanes: int
    clock: float

    def bandwidth_share(self, bytes_per_element: float, instructions_per_element: float) -> float:
        """The share of the published bandwidth that a kernel reaches at most."""
        for_bytes = bytes_per_element / self.bandwidth
        for_instructions = instructions_per_element / (self.units * self.lanes * self.clock)
        return for_bytes / max(for_bytes / MEMORY_SHARE, for_instructions / ISSUE_SHARE)


GPUS = (
    Gpu("A100 80 GB", "sm_80", 2.039e12, 108, 128, 1.41e9),
    Gpu("H100 SXM", "sm_90", 3.35e12, 132, 128, 1.83e9),
    Gpu("B200", "sm_100", 8.0e12, 148, 128, 1.85e9),
    Gpu("MI300X", "gfx942", 5.3e12, 304, 64, 2.1e9),
)
