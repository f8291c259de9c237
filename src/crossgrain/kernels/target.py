"""What a kernel is asked to fill."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..encoding import Encoding
from ..plane import Plane


@dataclass(frozen=True, eq=False)
class Target:
    """A plane to write and how to choose its bytes.

    ``amax``   the global amax, measured before (and perhaps reduced over ranks)
    ``scale``  per-tensor formats: the encode scale, when it comes from outside (delayed scaling)
    """

    plane: Plane
    encoding: Encoding
    amax: Tensor | None = None
    scale: Tensor | None = None

    @property
    def needs_amax(self) -> bool:
        """Whether the bytes depend on the largest magnitude of the whole input."""
        fmt = self.encoding.format
        return fmt.global_amax is not None or (fmt.block is None and not fmt.is_identity)

    def with_amax(self, amax: Tensor | None) -> Target:
        return Target(self.plane, self.encoding, amax, self.scale)
