"""GPUs with their published figures. None of them was measured here."""

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

KINDS = ("fp4", "fp6", "fp8", "bf16", "tf32")  # kinds of elements for which rates are published
_KIND_OF: dict[AnyElement, str] = {E2M1: "fp4", E2M3: "fp6", E3M2: "fp6", E4M3: "fp8", E5M2: "fp8"}


def kind_of_element(element: AnyElement) -> str:
    """The kind of an element, by which its rate is found: one of `KINDS`, or its own name if it is none of them."""
    own = element.name if element.name not in KINDS else f"{element.name} (another)"
    return _KIND_OF.get(element, own)


def known_kinds() -> list[str]:
    """All kinds for which a rate can be given: `KINDS`, and the elements of registered formats."""
    return list(dict.fromkeys((*KINDS, *(kind_of_element(fmt.element) for fmt in formats() if fmt.element))))


@dataclass(frozen=True)
class Device:
    """A GPU and how it is connected.

    Args:
        name: name of the GPU.
        teraflops: pairs of a kind of element and its dense peak rate (without sparsity) in TFLOP/s. Kinds that are
            missing are not multiplied natively. A kind is one of `KINDS`, or the name of an element whose rate you
            know: ``("int8", 4500)``.
        scalings: kinds of scales that are multiplied natively, as `crossgrain.gemm.operands.scaling_family` names them.
        memory: memory in GB (1e9 bytes).
        bandwidth: bandwidth of the memory in GB/s.
        link: bandwidth to the other GPUs of the node in GB/s, in one direction.
        network: bandwidth to other nodes in GB/s, in one direction, per GPU.
        node: number of GPUs in a node.

    Raises:
        ValueError: a figure is not positive, a kind of element is not known, or the rate of bf16 or tf32 is missing.

    Examples:
        >>> b200 = cg.planning.device_of("b200")
        >>> b200.name, b200.memory, b200.node
        ('b200', 180, 8)
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
                raise ValueError(f"device {self.name!r}: {field} must be above 0, got {getattr(self, field)}")
        for kind, rate in self.teraflops:
            if kind not in known_kinds():
                raise ValueError(
                    f"device {self.name!r}: there is no kind of element {kind!r}{did_you_mean(kind, known_kinds())}"
                )
            if not rate > 0:
                raise ValueError(f"device {self.name!r}: the rate of {kind} must be above 0 TFLOP/s, got {rate}")
        for kind in ("bf16", "tf32"):
            if self.rate(kind) is None:
                raise ValueError(f"device {self.name!r}: the rate of {kind} is missing")

    def multiplies(self, kind: str, scaling: str) -> bool:
        """Whether elements of this kind, with this kind of scales, are multiplied without decoding.

        A rate that is given for an element by its name holds for all its formats, with any scales.
        """
        return self.rate(kind) is not None and (kind not in KINDS or scaling in (*self.scalings, HIGH_PRECISION))

    def rate(self, kind: str) -> float | None:
        """The rate of a kind of element in TFLOP/s; None if the device does not multiply it."""
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
    """Return a device from text.

    Args:
        text: a name (``b200``), also with changed figures (``b200, memory=192, fp4=8000``) or with rates of elements
            (``b200, int8=4500``). A `Device` is returned as it is.

    Raises:
        ValueError: there is no such device or figure.

    Examples:
        >>> cg.planning.device_of("b200, memory=192").memory
        192.0
    """
    if isinstance(text, Device):
        return text
    kinds = known_kinds()
    known = (*kinds, "memory", "bandwidth", "link", "network", "node")
    name, settings = settings_of(text, known, ["node"], "device")
    if name is None:
        raise ValueError(f"device {text!r} must begin with the name of a device, as in 'b200, memory=192'")
    if name not in DEVICES:
        raise ValueError(f"there is no device {name!r}{did_you_mean(name, DEVICES)}")
    device = DEVICES[name]
    if not settings:
        return device
    rates = {**dict(device.teraflops), **{kind: settings.pop(kind) for kind in kinds if kind in settings}}
    return replace(device, name=f"{name} (changed)", teraflops=tuple(rates.items()), **settings)
