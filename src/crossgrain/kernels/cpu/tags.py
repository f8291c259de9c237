"""Compile-time constants of kernels: a kernel is compiled once for each tuple of tags it is called with.

A `Tag` names what a kernel is specialised for - an element format, an input dtype, yes or no. Inside a
kernel, functions that take a tag are chosen by it when the kernel is compiled; at run time a tag is
nothing.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numba import types
from numba.core.imputils import lower_constant
from numba.extending import NativeValue, models, register_model, typeof_impl, unbox

from . import known


@dataclass(frozen=True)
class Tag:
    """The Python side: an argument of a kernel."""

    name: str


# Files that call kernels and have no part in them.
CALLERS = (
    "__init__",
    "announcing",
    "backend",
    "decoders",
    "disk_cache",
    "encoders",
    "few_rows_products",
    "places",
    "plans",
    "products",
    "runtime",
    "scalars",
    "step_plans",
    "support",
    "tables",
    "turned_decoders",
    "work",
)
# A file of data alone: kernels depend on the part of it that their tags name.
DATA = ("known",)
# Elements that kernels name themselves, whatever their tags: those of NVFP4.
NAMED_IN_KERNELS = (known.E4M3, known.E2M1)


def _source_digest() -> str:
    """A digest of all that every kernel is compiled from."""
    here = Path(__file__).parent
    digest = hashlib.sha256()
    for source in sorted(path for path in here.glob("*.py") if path.stem not in (*CALLERS, *DATA)):
        digest.update(source.read_bytes())
    for element in NAMED_IN_KERNELS:
        digest.update(known.data_digest(element).encode())
    return digest.hexdigest()[:16]


# numba's cache on disk looks only at the file a kernel stands in. With the digest in the type of every tag,
# and a tag among the arguments of every kernel, machine code of other sources is never found. It is taken
# now, since a file that is edited later is not what this process compiles. The type of a tag that names an
# element has a digest of that element too, so that a change of one leaves the kernels of all others valid.
# Nothing else of ``formats`` goes into a kernel.
SOURCE_DIGEST = _source_digest()


class TagType(types.Type):
    """The numba type of one tag."""

    def __init__(self, tag: str) -> None:
        self.tag = tag
        digests = [SOURCE_DIGEST] + ([known.data_digest(known.ELEMENTS[tag])] if tag in known.ELEMENTS else [])
        super().__init__(name=f"Tag({tag}, {', '.join(digests)})")


register_model(TagType)(models.OpaqueModel)


@typeof_impl.register(Tag)
def _typeof_tag(tag: Tag, context: Any) -> TagType:
    return TagType(tag.name)


@unbox(TagType)
def _unbox_tag(type_: TagType, tag: Any, context: Any) -> NativeValue:
    return NativeValue(context.context.get_dummy_value())


@lower_constant(TagType)
def _constant_tag(context: Any, builder: Any, type_: TagType, tag: Any) -> Any:
    """Kernels may name a tag that does not depend on how they are called, such as `NO`."""
    return context.get_dummy_value()


F32, BF16 = Tag("f32"), Tag("bf16")
YES, NO = Tag("yes"), Tag("no")
