"""`Subject`: which tensor of which layer a quantizer is for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, eq=False)
class Subject:
    """The tensor that a quantizer quantizes. Its text is "fc1, input".

    Two subjects are equal only if they are the same object, because layers without names may have the same text. Copies
    of a quantizer share its subject.

    Attributes:
        layer: name of the layer, as rules of recipes and messages have it; empty if it is not known.
        tensor: "input", "weight", "grad_output", ...; empty if it is not known.
        group: which group of a grouped layer; None if the layer has no groups.
        from_rows: the quantizer gets decoded rows, not the tensor itself: its columnwise planes are made from the
            rowwise plane.
    """

    layer: str = ""
    tensor: str = ""
    group: int | None = None
    from_rows: bool = False

    def __str__(self) -> str:
        return f"{self.layer}, {self.tensor}" if self.layer or self.tensor else ""

    def __bool__(self) -> bool:
        return bool(self.layer or self.tensor)


NO_SUBJECT = Subject()
