"""Modules that multiply weights of their own, and how `convert` gets to these products.

A linear layer of torch is one module with one weight. Other modules multiply weights without a layer of their own:
fused experts have one parameter for the weights of all experts, attention one for queries, keys and values. A
`LayerAdapter` says which parameters of such a module are weights of products (`Projection`), and computes the module
with these products replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn


@dataclass(frozen=True)
class Projection:
    """A weight that a module multiplies its input by: ``y = x · Wᵀ + b``.

    Attributes:
        name: name of the projection in the module, for recipes and reports; empty if it is all that the module does.
        weight: name of the parameter. [out, in], [groups, out, in] with ``groups``; further dimensions belong to "in".
        bias: name of the parameter of the bias; None if there is none.
        groups: number of weights in the parameter, each for other rows of the input, as of experts; 0 if it is one
            weight for all rows.
        transposed: the parameter has the dimensions "out" and "in" exchanged.
        used: number of groups that each row of the input is multiplied by; only for counting multiply-adds.

    Examples:
        >>> cg.Projection("up", weight="up_proj", groups=8)
        Projection(name='up', weight='up_proj', bias=None, groups=8, transposed=False, used=1)
    """

    name: str
    weight: str = "weight"
    bias: str | None = None
    groups: int = 0
    transposed: bool = False
    used: int = 1

    @property
    def module_type(self) -> str:
        """The type of the layer in roles."""
        return "grouped_linear" if self.groups else "linear"

    def path_in(self, path: str) -> str:
        """The name of the layer, if ``path`` is that of the module."""
        return f"{path}.{self.name}".strip(".")

    def parameter(self, module: nn.Module) -> Tensor:
        """The parameter of the weight."""
        parameter: Tensor = _named(module, self.weight)
        return parameter

    def bias_of(self, module: nn.Module) -> Tensor | None:
        """The parameter of the bias."""
        return None if self.bias is None else _named(module, self.bias)

    def matrices(self, module: nn.Module) -> Tensor:
        """The weight as [out, in], or as [groups, out, in]: a view of the parameter."""
        weight = self.parameter(module)
        leading = 2 if self.groups else 1
        weight = weight.flatten(leading) if weight.dim() > leading + 1 else weight
        return weight.transpose(-1, -2) if self.transposed else weight


def _named(module: nn.Module, path: str) -> Any:
    """The attribute at a path, such as ``out_proj.weight``; None if there is none."""
    for name in path.split("."):
        module = getattr(module, name, None)  # type: ignore[assignment]
    return module


class Multiply(Protocol):
    """What an adapter calls to compute a projection in the formats of the recipe."""

    def __call__(
        self, name: str, x: Tensor, *, sizes: Sequence[int] | None = None, rows: slice | None = None
    ) -> Tensor:
        """Return ``x · Wᵀ + b``.

        Args:
            name: name of the projection.
            x: the input [..., in].
            sizes: for a projection with groups: the number of rows of each group. Rows of x are sorted by group.
            rows: use only these rows of the weight and bias.
        """
        ...


class LayerAdapter:
    """How `convert` changes the modules of a type. Subclass it, and pass an instance to `register_layer`.

    The module stays the same object with the same parameters. It gets a class that calls `forward` of the adapter.

    Examples:
        >>> class Adapter(cg.LayerAdapter):
        ...     def projections(self, module):
        ...         return [cg.Projection("", "weight")]
        ...     def forward(self, module, project, x):
        ...         return 2 * project("", x)
        >>> class Doubled(torch.nn.Linear):
        ...     def forward(self, x):
        ...         return 2 * torch.nn.functional.linear(x, self.weight)
        >>> cg.register_layer(Doubled, Adapter())
        >>> cg.convert(torch.nn.Sequential(Doubled(32, 32, bias=False)), "mxfp8").converted
        ['0']
    """

    def projections(self, module: nn.Module) -> Sequence[Projection]:
        """The weights of the module that are multiplied."""
        raise NotImplementedError

    def forward(self, module: Any, multiply: Multiply, *args: Any, **kwargs: Any) -> Any:
        """Compute the module.

        Args:
            module: the module.
            multiply: computes one projection; call it as ``multiply("gate_up_proj", x)``.
            *args: arguments of the module's forward.
            **kwargs: arguments of the module's forward.
        """
        raise NotImplementedError

    def why_not(self, module: nn.Module) -> str | None:
        """The reason why this module cannot be changed, although it is of the type; None if it can."""
        return None


_by_type: dict[type[nn.Module], LayerAdapter] = {}
_finders: list[Callable[[nn.Module], LayerAdapter | None]] = []


def register_layer(cls: type[nn.Module], adapter: LayerAdapter) -> None:
    """Let `convert` change modules of a type that it does not know.

    Only modules of exactly this type are changed: a subclass may compute something else. Registering a type again
    replaces its adapter, for modules that are converted afterwards.

    Args:
        cls: the type of the modules.
        adapter: says which weights they multiply, and computes them. See `OwnForward` for modules that call
            ``F.linear`` with their weights.

    Raises:
        TypeError: ``cls`` is not a type of modules, or ``adapter`` is not an adapter.

    Examples:
        >>> class Doubled(torch.nn.Linear):
        ...     def forward(self, x):
        ...         return 2 * torch.nn.functional.linear(x, self.weight, self.bias)
        >>> cg.register_layer(Doubled, cg.OwnForward("weight"))
        >>> cg.convert(torch.nn.Sequential(Doubled(32, 32)), "mxfp8").converted
        ['0']
    """
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise TypeError(f"register_layer takes a type of modules, got {cls!r}")
    if not isinstance(adapter, LayerAdapter):
        raise TypeError(f"register_layer takes a crossgrain.LayerAdapter, got {adapter!r}")
    _by_type[cls] = adapter


def register_finder(finder: Callable[[nn.Module], LayerAdapter | None]) -> None:
    """Let ``finder`` choose the adapter of modules whose types are not registered, by what they look like."""
    _finders.append(finder)


def adapter_for(module: nn.Module) -> LayerAdapter | None:
    """The adapter of a module; None if no one knows its type."""
    known = _by_type.get(type(module))
    if known is not None:
        return known
    return next((adapter for finder in _finders if (adapter := finder(module)) is not None), None)


def projections_of(module: nn.Module) -> Sequence[Projection]:
    """The projections of a module that an adapter knows and can change; empty if there is none."""
    adapter = adapter_for(module)
    if adapter is None or adapter.why_not(module) is not None:
        return ()
    return adapter.projections(module)
