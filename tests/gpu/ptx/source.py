"""PTX text to instructions: one kernel, its parameters, registers and labels. Names of registers are resolved here."""

import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Union

from .errors import PtxError

_TYPE_BITS = (
    {"pred": 1} | {f"{kind}{bits}": bits for kind in "bus" for bits in (8, 16, 32, 64)} | {"f32": 32, "f64": 64}
)
_BETWEEN = re.compile(r"[\s;]*")
_LABEL = re.compile(r"([$A-Za-z_][\w$]*)\s*:(?!:)")
DECLARATION = ".reg"  # the opcode of a declaration in inner braces, after which registers are undefined
_HEADER = {"reqntid", "maxntid", "minnctapersm", "maxnreg"}


@dataclass(frozen=True)
class Register:
    """A register; a predicate has one bit."""

    name: str
    bits: int


@dataclass(frozen=True)
class Immediate:
    """A constant, as it is written."""

    text: str


@dataclass(frozen=True)
class Special:
    """A register that the hardware sets: %tid.x."""

    name: str


@dataclass(frozen=True)
class Symbol:
    """A label, a parameter or a variable in shared memory."""

    name: str


@dataclass(frozen=True)
class Sink:
    """The operand ``_``: the result is thrown away."""


@dataclass(frozen=True)
class Vector:
    """{a, b, ...}"""

    items: tuple["Operand", ...]


@dataclass(frozen=True)
class Pair:
    """p|q: two results."""

    first: "Operand"
    second: "Operand"


@dataclass(frozen=True)
class Address:
    """[base + offset]"""

    base: Register | Symbol | Immediate
    offset: int


Operand = Union[Register, Immediate, Special, Symbol, Sink, Vector, Pair, Address]  # noqa: UP007 (recursive)


@dataclass(frozen=True)
class Instruction:
    """One instruction; it is executed where ``guard`` is not ``negated``."""

    opcode: str
    operands: tuple[Operand, ...]
    guard: Register | None
    negated: bool
    text: str

    @property
    def parts(self) -> tuple[str, ...]:
        """The opcode and its modifiers."""
        return tuple(self.opcode.split("."))


@dataclass(frozen=True)
class Parameter:
    """A parameter of the kernel."""

    name: str
    type: str

    @property
    def bits(self) -> int:
        """Its size."""
        return _TYPE_BITS[self.type]


@dataclass(frozen=True)
class Program:
    """A kernel."""

    name: str
    target: str
    parameters: tuple[Parameter, ...]
    threads: int
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    shared: tuple[str, ...]  # names of the dynamic shared memory


@lru_cache(maxsize=64)
def parse(ptx: str) -> Program:
    """The only kernel of a PTX module."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", ptx, flags=re.S)
    text = re.sub(r"^[ \t]*\.(loc|file)[ \t][^\n]*$", "", text, flags=re.M)
    if re.search(r"\.func\b", text):
        raise PtxError("functions are not known: the module must be one kernel")
    entries = list(re.finditer(r"\.entry\s+(\w+)\s*\(([^)]*)\)([^{]*)\{", text))
    if len(entries) != 1:
        raise PtxError(f"the module has {len(entries)} kernels; exactly one is needed")
    (entry,) = entries
    target = re.search(r"^\s*\.target\s+(\w+)", text, re.M)
    shared = tuple(re.findall(r"\.extern\s+\.shared\s+(?:\.align\s+\d+\s+)?\.b8\s+(\w+)\[\]", text[: entry.start()]))
    body = _Body(text, entry.end(), shared)
    return Program(
        entry[1],
        target[1] if target else "",
        tuple(_parameter(each) for each in entry[2].split(",") if each.strip()),
        _threads(entry[3]),
        tuple(body.instructions),
        body.labels,
        shared,
    )


def _parameter(text: str) -> Parameter:
    found = re.fullmatch(r"\s*\.param\s+\.(\w+)(?:\s+\.ptr(?:\s+\.\w+)?(?:\s+\.align\s+\d+)?)?\s+(\w+)\s*", text)
    if not found or found[1] not in _TYPE_BITS:
        raise PtxError(f"a parameter of this kind is not known: {text.strip()}")
    return Parameter(found[2], found[1])


def _threads(header: str) -> int:
    directives = dict(re.findall(r"\.(\w+)\s+([\d, ]+)", header))
    if unknown := set(re.findall(r"\.(\w+)", header)) - _HEADER:
        raise PtxError(f"directives of the kernel are not known: {', '.join(sorted(unknown))}")
    said = directives.get("reqntid") or directives.get("maxntid")
    if said is None:
        raise PtxError("the kernel does not say how many threads a block has")
    first, *others = (int(each) for each in said.split(","))
    if any(each != 1 for each in others) or first % 32:
        raise PtxError(f"blocks of {said.strip()} threads are not known: whole warps in one dimension are")
    return first


@dataclass
class _Scope:
    """Registers that are declared between braces; those of inner braces get a number, for others have their names."""

    number: int
    single: dict[str, int] = field(default_factory=dict)  # name -> bits
    ranges: dict[str, tuple[int, int]] = field(default_factory=dict)  # prefix -> (bits, how many)

    def find(self, name: str) -> Register | None:
        own = f"{name}#{self.number}" if self.number else name
        if name in self.single:
            return Register(own, self.single[name])
        found = re.fullmatch(r"(%?[A-Za-z_$]+)(\d+)", name)
        if found and found[1] in self.ranges and int(found[2]) < self.ranges[found[1]][1]:
            return Register(own, self.ranges[found[1]][0])
        return None


class _Body:
    """Walks over the statements of a kernel from ``at`` on, to its closing brace."""

    def __init__(self, text: str, at: int, shared: tuple[str, ...]) -> None:
        self.instructions: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self._scopes = [_Scope(0)]
        self._known: dict[str, Operand] = {}  # of the outer scope
        self._opened = 0
        while self._scopes:
            at = self._statement(text, at)
        for each in self.instructions:
            for operand in each.operands:
                if isinstance(operand, Symbol) and operand.name not in (*self.labels, *shared):
                    raise PtxError(f"{operand.name} is not declared: {each.text}")

    def _statement(self, text: str, at: int) -> int:
        """Read one statement, brace or label; where the next one begins."""
        at = _BETWEEN.match(text, at).end()  # type: ignore[union-attr] # it matches nothing, too
        if at >= len(text):
            raise PtxError("the kernel has no end")
        if text[at] == "{":
            self._opened += 1
            self._scopes.append(_Scope(self._opened))
            return at + 1
        if text[at] == "}":
            self._scopes.pop()
            return at + 1
        label = _LABEL.match(text, at)
        if label:
            if label[1] in self.labels:
                raise PtxError(f"label {label[1]} is there twice")
            self.labels[label[1]] = len(self.instructions)
            return label.end()
        end = text.index(";", at)
        statement = " ".join(text[at:end].split())
        if statement.startswith(".reg"):
            self._declare(statement)
        elif statement.startswith(".") and not statement.startswith(".pragma"):
            raise PtxError(f"directive is not known: {statement}")
        elif not statement.startswith("."):
            self.instructions.append(self._instruction(statement))
        return end + 1

    def _declare(self, statement: str) -> None:
        found = re.fullmatch(r"\.reg \.(\w+) (.*)", statement)
        if not found or found[1] not in _TYPE_BITS:
            raise PtxError(f"registers of this kind are not known: {statement}")
        scope, bits = self._scopes[-1], _TYPE_BITS[found[1]]
        self._known.clear()
        names: list[str] = []
        for name in found[2].split(","):
            many = re.fullmatch(r"(%?[A-Za-z_$]+)<(\d+)>", name.strip())
            if many:
                scope.ranges[many[1]] = (bits, int(many[2]))
                names += [f"{many[1]}{number}" for number in range(int(many[2]))]
            else:
                scope.single[name.strip()] = bits
                names.append(name.strip())
        if scope.number:  # in a loop, these registers are new each time
            registers = tuple(self._operand(each, statement) for each in names)
            self.instructions.append(Instruction(DECLARATION, registers, None, False, statement))

    def _instruction(self, statement: str) -> Instruction:
        found = re.fullmatch(r"(?:@(!?)([%\w$]+) )?([a-z]\w*(?:(?:\.|::)\w+)*)(?: (.*))?", statement)
        if not found:
            raise PtxError(f"this is no instruction: {statement}")
        guard = self._operand(found[2], statement) if found[2] else None
        if guard is not None and not (isinstance(guard, Register) and guard.bits == 1):
            raise PtxError(f"{found[2]} is no predicate: {statement}")
        operands = tuple(self._operand(each, statement) for each in _split(found[4] or ""))
        return Instruction(found[3], operands, guard, bool(found[1]), statement)

    def _operand(self, text: str, statement: str) -> Operand:
        if len(self._scopes) > 1:
            return self._parsed(text, statement)
        if text not in self._known:  # most operands are there many times
            self._known[text] = self._parsed(text, statement)
        return self._known[text]

    def _parsed(self, text: str, statement: str) -> Operand:
        if text == "_":
            return Sink()
        if text.startswith("{"):
            return Vector(tuple(self._operand(each, statement) for each in _split(text[1:-1])))
        if text.startswith("["):
            return self._address(text, statement)
        if "|" in text:
            first, second = (self._operand(each.strip(), statement) for each in text.split("|"))
            return Pair(first, second)
        if re.fullmatch(r"-?(0[fF][0-9A-Fa-f]{8}|0[dD][0-9A-Fa-f]{16}|0[xX][0-9A-Fa-f]+U?|\d+U?|\d+\.\d+)", text):
            return Immediate(text)
        for scope in reversed(self._scopes):
            if register := scope.find(text):
                return register
        if text.startswith("%"):
            return Special(text)
        if re.fullmatch(r"[$A-Za-z_][\w$]*", text):
            return Symbol(text)
        raise PtxError(f"operand {text} is not known: {statement}")

    def _address(self, text: str, statement: str) -> Address:
        found = re.fullmatch(r"\[\s*([%$\w]+)\s*(?:\+\s*(-?\w+))?\s*\]", text)
        base = self._operand(found[1], statement) if found else None
        if not found or not isinstance(base, Register | Symbol | Immediate):
            raise PtxError(f"address {text} is not known: {statement}")
        # Parameters are symbols of their own kind: whether they exist is seen when they are read.
        return Address(base, int(found[2] or "0", 0))


def _split(text: str) -> list[str]:
    """Operands, with braces and brackets kept together."""
    return [each.strip() for each in re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{\[])+", text) if each.strip()]
