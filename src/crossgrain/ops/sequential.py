"""`Sequential`: a sequence of modules in which neighbouring fusible operations run as one autograd function."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Self, overload

from torch import Tensor, nn

from .fuser import OperationFuser
from .op import FusibleOperation, Kwargs


class Sequential(nn.Module):
    """Like `torch.nn.Sequential`, but neighbouring operations are fused, and it has more methods of a list.

        block = Sequential(LayerNorm(64), Linear(64, 256), GELU(), Linear(256, 64))
        y = block(x)

    Extra inputs of operations are passed after the input, in the order of the operations. Extra outputs are returned
    after the output, in a tuple.

    Args:
        *modules: modules or operations, or one mapping from names to modules.

    Examples:
        >>> block = cg.ops.Sequential(cg.ops.LayerNorm(32), cg.ops.Linear(32, 64), cg.ops.GELU(), cg.ops.Linear(64, 32))
        >>> with cg.autocast(recipe="mxfp8"):
        ...     y = block(torch.randn(32, 32))
        >>> y.shape
        torch.Size([32, 32])
    """

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self._grouped_modules: tuple[nn.Module, ...] = ()
        self._groups: list[OperationFuser | nn.Module] = []
        if len(modules) == 1 and isinstance(modules[0], Mapping):
            for name, module in modules[0].items():
                self.add_module(name, module)
        else:
            self.extend(modules)

    # ---- a list --------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._list())

    @overload
    def __getitem__(self, index: int) -> nn.Module: ...
    @overload
    def __getitem__(self, index: slice) -> Sequential: ...
    def __getitem__(self, index: int | slice) -> nn.Module:
        found = self._list()[index]
        return found if isinstance(found, nn.Module) else Sequential(*found)

    def __setitem__(self, index: int, module: nn.Module) -> None:
        modules = self._list()
        modules[index] = _checked(module)
        self._become(modules)

    def __delitem__(self, index: int | slice) -> None:
        modules = self._list()
        del modules[index]
        self._become(modules)

    def append(self, module: nn.Module) -> Self:
        return self.extend([module])

    def extend(self, modules: Iterable[nn.Module]) -> Self:
        self._become([*self._list(), *(_checked(module) for module in modules)])
        return self

    def insert(self, idx: int, module: nn.Module) -> Self:
        modules = self._list()
        modules.insert(idx, _checked(module))
        self._become(modules)
        return self

    def pop(self, idx: int = -1) -> nn.Module:
        modules = self._list()
        popped = modules.pop(idx)
        self._become(modules)
        return popped

    def __add__(self, other: Iterable[nn.Module]) -> Sequential:
        return Sequential(*self, *other)

    def __iadd__(self, other: Iterable[nn.Module]) -> Self:
        return self.extend(list(other))

    def _list(self) -> list[nn.Module]:
        return [module for module in self._modules.values() if module is not None]

    def _become(self, modules: list[nn.Module]) -> None:
        self._modules.clear()
        for index, module in enumerate(modules):
            self.add_module(str(index), module)

    # ---- running -------------------------------------------------------------------------------

    @property
    def _module_groups(self) -> list[OperationFuser | nn.Module]:
        """One fuser for each run of neighbouring operations; other modules unchanged."""
        modules = tuple(self._list())
        unchanged = len(modules) == len(self._grouped_modules) and all(
            now is before for now, before in zip(modules, self._grouped_modules, strict=True)
        )
        if not unchanged:
            self._groups, self._grouped_modules = _grouped(modules), modules
        return self._groups

    def forward(
        self,
        input: Tensor,
        *extra_inputs: Tensor,
        op_kwargs: Mapping[Any, Kwargs] | None = None,
    ) -> Any:
        """Run all modules.

        Args:
            input: the input of the first module.
            *extra_inputs: extra inputs of operations, in the order of the operations.
            op_kwargs: keyword arguments for operations; the key is an operation or its position.

        Returns:
            The output, or a tuple of the output and the extra outputs.
        """
        x: Any = input
        rest = list(extra_inputs)
        outputs: list[Tensor] = []
        kwargs = _by_basic_op(self._list(), op_kwargs or {})
        groups = self._module_groups
        counts = [group.num_extra_inputs if isinstance(group, OperationFuser) else 0 for group in groups]
        if sum(counts) != len(rest):
            raise ValueError(f"the sequence takes {sum(counts)} extra inputs, but {len(rest)} were given")
        for group, count in zip(groups, counts, strict=True):
            if not isinstance(group, OperationFuser):
                x = group(x)
                continue
            mine, rest = rest[:count], rest[count:]
            result = group(x, *mine, basic_op_kwargs=[kwargs.get(id(op), {}) for op in group._basic_ops])
            x, *extra = result if isinstance(result, tuple) else (result,)
            outputs += extra
        return (x, *outputs) if outputs else x

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the groups of modules, which copies and unpickled objects make themselves."""
        return {**self.__dict__, "_groups": [], "_grouped_modules": ()}


def _checked(module: Any) -> nn.Module:
    if not isinstance(module, nn.Module):
        raise TypeError(f"a Sequential takes modules (torch.nn.Module), got {type(module).__name__}")
    return module


def _grouped(modules: tuple[nn.Module, ...]) -> list[OperationFuser | nn.Module]:
    groups: list[OperationFuser | nn.Module] = []
    neighbours: list[FusibleOperation] = []
    for module in (*modules, None):
        if isinstance(module, FusibleOperation):
            neighbours.append(module)
            continue
        if neighbours:
            groups.append(OperationFuser(neighbours))
            for op in neighbours:
                for basic in op.as_basic_ops():
                    basic._in_sequence = True
            neighbours = []
        if module is not None:
            groups.append(module)
    return groups


def _by_basic_op(modules: list[nn.Module], op_kwargs: Mapping[Any, Kwargs]) -> dict[int, Kwargs]:
    """Keyword arguments by the id of the basic operation they are for, the first one of an operation with several."""
    kwargs: dict[int, Kwargs] = {}
    for key, options in op_kwargs.items():
        op = modules[key] if isinstance(key, int) else key
        if not isinstance(op, FusibleOperation) or not any(op is module for module in modules):
            raise ValueError(
                f"the keys of op_kwargs must be operations of this sequence or their positions, got {key!r}"
            )
        kwargs[id(op.as_basic_ops()[0])] = options
    return kwargs
