"""What a compiled kernel needs and contains, read from its PTX and its machine code."""

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import triton

from ..ptx.products import products
from ..ptx.registry import OPERATIONS, inexact_reason
from ..ptx.source import parse

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_SASS = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")
_GCN = re.compile(r"\s+((?:v|s|global|buffer|ds|flat|scratch)_\w+)(?:\s|$)")
_GCN_ACCESS = re.compile(r"(?:global|buffer|flat)_(load|store)_(?:d16_)?([a-z]+\d*(?:x\d)?)(?:_d16)?(?:_hi)?")
_PADDING = ("NOP", "s_nop", "s_code_end")
_SASS_BYTES = {"256": 32, "128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}
_GCN_BYTES = {"dwordx4": 16, "b128": 16, "dwordx3": 12, "dwordx2": 8, "b64": 8, "dword": 4, "b32": 4} | {
    "short": 2, "ushort": 2, "sshort": 2, "b16": 2, "byte": 1, "ubyte": 1, "sbyte": 1, "b8": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Built:
    """A kernel for one target."""

    target: str
    asm: dict[str, Any]  # what each step of the compiler made: "ptx" and "cubin", or "amdgcn" and "hsaco"
    shared: int  # bytes of shared memory
    threads: int  # of a block
    seconds: float
    constants: frozenset[str] = frozenset()  # arguments that a launch does not pass, for they are compiled in

    @property
    def ptx(self) -> str:
        """The PTX of an NVIDIA target."""
        return str(self.asm["ptx"])

    @cached_property
    def sass(self) -> str:
        """The disassembly of an NVIDIA target."""
        return self._tool("nvdisasm", "-c")

    @cached_property
    def registers(self) -> int:
        """Registers of a thread."""
        return self._resources["registers"]

    @cached_property
    def spills(self) -> int:
        """Bytes of a thread's stack and local memory: there are none unless registers do not suffice."""
        return self._resources["spills"]

    @cached_property
    def instructions(self) -> Counter[str]:
        """How often each machine instruction stands in the program, padding left out."""
        pattern, text = (_SASS, self.sass) if "cubin" in self.asm else (_GCN, str(self.asm["amdgcn"]))
        found = Counter(match[1] for line in text.splitlines() if (match := pattern.match(line)))
        return Counter({name: n for name, n in found.items() if not name.startswith(_PADDING)})

    def count(self, pattern: str) -> int:
        """Machine instructions whose whole name matches a regular expression."""
        return sum(n for name, n in self.instructions.items() if re.fullmatch(pattern, name))

    def instructions_per_element(self, elements: int) -> float:
        """Machine instructions of all threads of a block for each of its ``elements``; a loop counts once."""
        return self.instructions.total() * self.threads / elements

    @cached_property
    def widths(self) -> Counter[tuple[str, int]]:
        """How many loads and stores of global memory have which bytes for each thread: ("load", 16)."""
        found: Counter[tuple[str, int]] = Counter()
        for name, n in self.instructions.items():
            if access := _access(name):
                found[access] += n
        return found

    @cached_property
    def inexact(self) -> Counter[str]:
        """PTX instructions whose result PTX leaves open, and fused multiply-adds."""
        return inexact(self.ptx)

    @cached_property
    def _resources(self) -> dict[str, int]:
        if "cubin" in self.asm:
            said = self._tool("cuobjdump", "-res-usage")
            usage = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", said)
            if not usage:
                raise RuntimeError(f"cuobjdump says nothing about registers:\n{said}")
            return {"registers": int(usage[1]), "spills": int(usage[2]) + int(usage[3])}
        text = str(self.asm["amdgcn"])
        keys = {"registers": "vgpr_count", "spills": "private_segment_fixed_size"}
        found = {name: re.search(rf"\.{key}:\s*(\d+)", text) for name, key in keys.items()}
        return {name: int(match[1]) for name, match in found.items() if match}

    def _tool(self, name: str, option: str) -> str:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.asm["cubin"])
            file.flush()
            done = subprocess.run([_TOOLS / name, option, file.name], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{name} fails: {done.stderr}")
        return done.stdout


def inexact(ptx: str) -> Counter[str]:
    """Instructions of PTX whose result PTX leaves open (approximate, flushing, fusible), and fused multiply-adds.

    Those of -0 are products, see `products`.
    """
    program = parse(ptx)
    exact = products(program)
    opcodes = Counter(each.opcode for each in program.instructions if each not in exact)
    return Counter({name: n for name, n in opcodes.items() if inexact_reason(name) or _fused(name)})


def _fused(opcode: str) -> bool:
    known = OPERATIONS.get(opcode)
    return opcode.split(".")[0] == "fma" if known is None else known.fused


def _access(name: str) -> tuple[str, int] | None:
    """("load" or "store", bytes) of a machine instruction on global memory."""
    parts = name.split(".")
    if parts[0] in ("LDG", "STG"):
        size = next((_SASS_BYTES[each] for each in parts if each in _SASS_BYTES), 4)
        return ("load" if parts[0] == "LDG" else "store"), size
    gcn = _GCN_ACCESS.fullmatch(name)
    if gcn and gcn[2] in _GCN_BYTES:
        return gcn[1], _GCN_BYTES[gcn[2]]
    if gcn:
        raise RuntimeError(f"the width of {name} is not known")
    return None
