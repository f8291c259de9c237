"""GPUs by published figures, none of them measured here."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..formats import (
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E5M2,
    IDENTITY,
    AnyElement,
    formats,
    fp8_block_format,
    fp8_format,
    mxfp8_format,
    nvfp4_format,
)
from ..gemm.operands import scaling_family
from ..recipe.syntax import did_you_mean
from .settings_text import settings_of

HIGH_PRECISION = scaling_family(IDENTITY)

KINDS = ("fp4", "fp6", "fp8", "bf16", "tf32")  # of elements whose rates are published
_KIND_OF: dict[AnyElement, str] = {E2M1: "fp4", E2M3: "fp6", E3M2: "fp6", E4M3: "fp8", E5M2: "fp8"}


def kind_of_element(element: AnyElement) -> str:
    """The kind whose rate an element has: its own name, if it is none of those that rates are published for."""
    own = element.name if element.name not in KINDS else f"{element.name} (another)"
    return _KIND_OF.get(element, own)


def known_kinds() -> list[str]:
    """All that a rate can be given for: published ones, and the elements of registered formats."""
    return list(dict.fromkeys((*KINDS, *(kind_of_element(fmt.element) for fmt in formats() if fmt.element))))


@dataclass(frozen=True)
class Device:
    """One GPU and how it is connected.

    ``teraflops``  dense peak (no sparsity) by kind of element; a kind that is missing is not multiplied natively.
                   Beside those of `KINDS` it may have elements by name, with a rate that you know: ``("int8", 4500)``
    ``scalings``   ways of scaling, as `crossgrain.operands.scaling_family` names them, that are multiplied natively
    ``memory``     GB (1e9 bytes)
    ``bandwidth``  of the memory, GB/s
    ``link``       GB/s in one direction to the other GPUs of its node
    ``network``    GB/s in one direction to other nodes, for each GPU
    ``node``       GPUs that ``link`` connects
    """

    name: str
    teraflops: tuple[tuple[str, float], ...]
    scalings: tuple[str, ...]
    memory: float
    bandwidth: float
    link: float
    network: float
    node: int = 8

    def __post_init__(self) -> None:
        for field in ("memory", "bandwidth", "link", "network", "node"):
            if not getattr(self, field) > 0:
                raise ValueError(f"device {self.name!r}: {field} is more than 0, not {getattr(self, field)}")
        for kind, rate in self.teraflops:
            if kind not in known_kinds():
                raise ValueError(
                    f"device {self.name!r}: no kind of element {kind!r}{did_you_mean(kind, known_kinds())}"
                )
            if not rate > 0:
                raise ValueError(f"device {self.name!r}: {kind} is more than 0 TFLOP/s, not {rate}")
        for kind in ("bf16", "tf32"):
            if self.rate(kind) is None:
                raise ValueError(f"device {self.name!r}: the rate of {kind} has to be known")

    def multiplies(self, kind: str, scaling: str) -> bool:
        """Whether elements of this kind, scaled like this, are multiplied as they are.

        A rate that someone gave for an element by its name is the rate of its formats, however they are scaled.
        """
        return self.rate(kind) is not None and (kind not in KINDS or scaling in (*self.scalings, HIGH_PRECISION))

    def rate(self, kind: str) -> float | None:
        """TFLOP/s of a kind of element; None if the device does not multiply it."""
        return dict(self.teraflops).get(kind)


_FP8 = (scaling_family(fp8_format()), scaling_family(fp8_block_format()))
_MX, _NVFP4 = scaling_family(mxfp8_format()), scaling_family(nvfp4_format())


def _device(name: str, rates: dict[str, float], scalings: tuple[str, ...], **rest: float) -> Device:
    node = int(rest.pop("node", 8))
    return Device(name, tuple(rates.items()), scalings, node=node, **rest)


_HOPPER: dict[str, float] = {"fp8": 1979, "bf16": 989, "tf32": 495}
_B200: dict[str, float] = {"fp4": 9000, "fp6": 4500, "fp8": 4500, "bf16": 2250, "tf32": 1100}
_GB200: dict[str, float] = {"fp4": 10000, "fp6": 5000, "fp8": 5000, "bf16": 2500, "tf32": 1250}
_BLACKWELL = (*_FP8, _MX, _NVFP4)

DEVICES = {
    device.name: device
    for device in (
        _device("a100", {"bf16": 312, "tf32": 156}, (), memory=80, bandwidth=2039, link=300, network=25),
        _device("h100", _HOPPER, _FP8, memory=80, bandwidth=3350, link=450, network=50),
        _device("h200", _HOPPER, _FP8, memory=141, bandwidth=4800, link=450, network=50),
        _device("b200", _B200, _BLACKWELL, memory=180, bandwidth=8000, link=900, network=50),
        _device("gb200", _GB200, _BLACKWELL, memory=186, bandwidth=8000, link=900, network=50, node=72),
    )
}


def device_of(text: str | Device) -> Device:
    """``"b200"``, or with numbers of your own: ``"b200, memory=192, fp4=8000"``, also for elements: ``int8=4500``."""
    if isinstance(text, Device):
        return text
    kinds = known_kinds()
    known = (*kinds, "memory", "bandwidth", "link", "network", "node")
    name, settings = settings_of(text, known, ["node"], "device")
    if name is None:
        raise ValueError(f"device {text!r}: begin with one that is known, as in 'b200, memory=192'")
    if name not in DEVICES:
        raise ValueError(f"no device {name!r}{did_you_mean(name, DEVICES)}")
    device = DEVICES[name]
    if not settings:
        return device
    rates = {**dict(device.teraflops), **{kind: settings.pop(kind) for kind in kinds if kind in settings}}
    return replace(device, name=f"{name} (changed)", teraflops=tuple(rates.items()), **settings)
