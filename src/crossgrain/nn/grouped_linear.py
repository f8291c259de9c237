"""`GroupedLinear`: one linear layer per group of rows, as for the experts of a mixture of experts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..linear.grouped_function import Groups
from ..linear.grouped_input import why_not_sent, why_rows_are_not_enough
from ..linear.padding import known_format
from ..linear.parallel import share
from ..linear.split_quantize import padded_groups
from ..planes import ROWWISE, round_up
from ..quantizers.base import Quantizer
from ..recipe import QuantizerRole, Recipe, active_recipe, get_align_size_for_quantization
from ..runtime.passes import current_pass
from .compiled import compilable
from .grouped_call import grouped_call
from .grouped_parameters import GroupedParameters
from .linear_module import InitMethod, LinearDetails, LinearModule, LinearSlots, ParameterSpec, default_init
from .module_interface import Mode
from .options import options_for, parameter_options


class GroupedLinear(GroupedParameters, LinearModule):
    """``y[rows of g] = x[rows of g] · W_gᵀ + b_g`` for x [..., in_features] whose rows are sorted by group.

    Args:
        num_gemms: number of groups.
        in_features: features of the input, of the whole layer.
        out_features: features of the output, of the whole layer.
        sequence_parallel: not supported; must be False.
        fuse_wgrad_accumulation: see `Linear`.
        tp_group: see `Linear`.
        tp_size: see `Linear`.
        get_rng_state_tracker: see `Linear`.
        rng_tracker_name: see `Linear`.
        init_method: see `Linear`.
        bias: add a bias.
        return_bias: return the biases as a second result instead of adding them.
        params_dtype: see `Linear`.
        parallel_mode: see `Linear`.
        device: see `Linear`.
        delay_wgrad_compute: see `Linear`.
        save_original_input: see `Linear`.
        single_grouped_weight: have one parameter ``weight`` [groups, out, in] instead of ``weight0``, ``weight1``, ...
            If it is kept quantized in a format with a scale for the whole tensor, all groups share one scale.
        single_grouped_bias: have one parameter ``bias`` [groups, out] instead of ``bias0``, ``bias1``, ...
        name: name of the layer, for recipes and messages.
        use_grouped_tensor: not supported; must be None or False.
        **gpu_options: options of GPU communication; they must be off.

    Examples:
        >>> experts = cg.GroupedLinear(2, 32, 64)
        >>> with cg.autocast(recipe="mxfp8"):
        ...     y = experts(torch.ones(48, 32), [16, 32])  # 16 rows for the first, 32 for the second
        >>> y.shape
        torch.Size([48, 64])
    """

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: InitMethod | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: Literal["row", "column"] | None = None,
        device: torch.device | str | int | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        name: str | None = None,
        use_grouped_tensor: bool | None = None,
        **gpu_options: Any,
    ) -> None:
        super().__init__(**options_for(LinearModule.__init__, locals()))
        self._require_parallel_mode()
        if self.sequence_parallel:
            raise NotImplementedError(
                f"{self.layer}: sequence_parallel is not supported: ranks do not share rows of groups, whose sizes "
                "change in every step"
            )
        if num_gemms < 1:
            raise ValueError(f"{self.layer}: num_gemms must be at least 1, got {num_gemms}")
        if use_grouped_tensor:
            raise NotImplementedError(
                f"{self.layer}: use_grouped_tensor=True needs grouped GEMM kernels of a GPU and is not supported"
            )
        self.num_gemms = num_gemms
        rows, columns = (self.tp_size if parallel_mode == mode else 1 for mode in ("column", "row"))
        self.in_features = share(self.layer, "in_features", in_features, columns)
        self.out_features = share(self.layer, "out_features", out_features, rows)
        self.single_grouped_weight = single_grouped_weight
        self.single_grouped_bias = single_grouped_bias and bias
        self._make_parameters(init_method or default_init, parameter_options(params_dtype, device))

    # ---- parameters ----------------------------------------------------------------------------

    def _make_parameters(self, init: InitMethod, factory: Mapping[str, Any]) -> None:
        rows, columns, mode = self.out_features, self.in_features, self.parallel_mode
        if self.single_grouped_weight:
            cut = None if mode is None else {"column": 1, "row": 2}[mode]
            shape = (self.num_gemms, rows, columns)
            self._make_parameter("weight", ParameterSpec(shape, partial(_init_each, init), True, cut), factory)
            self._check_weight_can_be_cut()
        for g in range(self.num_gemms):
            if not self.single_grouped_weight:
                self._add_weight(f"weight{g}", (rows, columns), init, factory, mode)
            if self.use_bias and not self.single_grouped_bias:
                self._add_bias(f"bias{g}", rows, factory, mode=mode)
        if self.single_grouped_bias:
            cut = 1 if mode == "column" else None
            self._make_parameter("bias", ParameterSpec((self.num_gemms, rows), nn.init.zeros_, cut=cut), factory)

    def _check_weight_can_be_cut(self) -> None:
        try:
            self._group_weights()
        except ValueError as error:
            raise ValueError(
                f"{self.layer}: a single weight of {self.num_gemms} groups cannot be kept quantized: {error}. Use "
                "single_grouped_weight=False"
            ) from error

    @property
    def _groups(self) -> int:
        return self.num_gemms

    @property
    def _biased(self) -> bool:
        return self.use_bias

    # ---- recipes -------------------------------------------------------------------------------

    def get_quantizer_roles(self, *, fwd: bool, num_quantizers: int) -> list[QuantizerRole | None]:
        def role(tensor: str) -> QuantizerRole:
            return QuantizerRole("grouped_linear", tensor, self.name or "")

        of_one: list[QuantizerRole | None] = (
            [role("input"), role("weight"), self._output_role] if fwd else [role("grad_output"), self._grad_input_role]
        )
        if num_quantizers != len(of_one) * self.num_gemms:
            raise ValueError(
                f"{self.layer} has {len(of_one)} slots for each of {self.num_gemms} groups in this pass, got "
                f"num_quantizers={num_quantizers}"
            )
        return of_one * self.num_gemms

    def _slot_counts(self) -> Mapping[Mode, int]:
        return {"forward": 3 * self.num_gemms, "backward": 2 * self.num_gemms}

    def _linear_slots(self) -> Sequence[LinearSlots]:
        return [LinearSlots(3 * g, 3 * g + 1, 3 * g + 2, 2 * g, 2 * g + 1) for g in range(self.num_gemms)]

    def _details(self, recipe: Recipe, quantizers: Mapping[str, Sequence[Quantizer]]) -> list[LinearDetails]:
        self._check_groups_alike(recipe, quantizers)
        return super()._details(recipe, quantizers)

    def _cache_name(self, index: int) -> str:
        return f"weight{index}"

    # ---- forward -------------------------------------------------------------------------------

    @compilable
    def forward(
        self,
        inp: Tensor,
        m_splits: Sequence[int] | Tensor,
        is_first_microbatch: bool | None = None,
        out: Tensor | None = None,
        dgrad_out: Tensor | None = None,
    ) -> Any:
        """Compute the layer.

        Args:
            inp: x, plain or quantized, with rows sorted by group.
            m_splits: number of rows of each group; 0 is allowed. If they are on a GPU, the host waits for them.
            is_first_microbatch: see `Linear.forward`.
            out: memory to write y to.
            dgrad_out: memory to write the gradient of ``inp`` to.

        Returns:
            y, or ``(y, biases)`` with ``return_bias``.
        """
        sizes = checked_sizes(m_splits, self.num_gemms, inp, self.layer)
        if torch.compiler.is_compiling():
            return self._traced(inp, sizes)
        weights, biases = self._group_weights(), self._group_biases()
        packed = self._named("weight") if self.single_grouped_weight else None
        this = self._forward_pass(inp, is_first_microbatch)
        with this.step:
            groups = Groups(
                sizes,
                weights,
                biases if self.apply_bias else [None] * self.num_gemms,
                packed_weight=packed,
                packed_bias=self._named("bias") if self.single_grouped_bias and self.apply_bias else None,
                out=out,
                dgrad_out=dgrad_out,
                parallel=self._parallel(0),
            )
            y = grouped_call(self, inp, groups, this)
        return (y, biases) if self.return_bias else y

    def token_quantizer(self) -> Quantizer | None:
        """The quantizer for tokens that are sent to this layer quantized (see `TokenExchange.dispatch`).

        It is that of the layer's input in the current recipe.

        Returns:
            The quantizer, or None if the layer reads its input unquantized.

        Raises:
            ValueError: rows of this format cannot be sent separately, or training needs more than rowwise planes.
        """
        recipe = self._recipe_in_force()
        if recipe is None or self._only_calibrates():
            return None
        quantizer: Quantizer = self._prepare(recipe).details[0].input
        fmt = known_format(quantizer, ROWWISE)
        if fmt is not None and fmt.is_identity:
            return None
        trains = current_pass().trains and any(getattr(self, name).requires_grad for name in self.weight_names)
        override = recipe.backward_override
        reason = why_not_sent(quantizer)
        if reason is None and trains:
            reason = why_rows_are_not_enough(quantizer, override, self.save_original_input)
        if reason is not None:
            raise ValueError(
                f"{self.layer}: the input cannot be sent to this layer as rowwise planes: {reason}. Or dispatch the "
                "tokens without a quantizer"
            )
        return quantizer

    def row_multiple(self) -> int:
        """The rows of a group are padded to a multiple of this, because of the formats of the recipe in force."""
        recipe = self._recipe_in_force()
        if recipe is None:
            return 1
        multiples = [each.padding.m_backward for each in self._prepare(recipe).details]
        return math.lcm(*multiples)

    def _traced(self, inp: Tensor, sizes: list[int]) -> Any:
        """Forward in a compiled graph, where each group is a layer of its own; results are the same."""
        weights = list(self._named("weight").unbind(0)) if self.single_grouped_weight else self._group_weights()
        biases = list(self._named("bias").unbind(0)) if self.single_grouped_bias else self._group_biases()
        used = biases if self.apply_bias else [None] * self.num_gemms
        this = self._forward_pass(inp, None)
        with this.step:
            groups = inp.reshape(-1, inp.shape[-1]).split(sizes)
            y = torch.cat([self._linear(g, rows, weights[g], used[g], this) for g, rows in enumerate(groups)])
        y = y.reshape(*inp.shape[:-1], self.out_features)
        return (y, biases) if self.return_bias else y

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"num_gemms={self.num_gemms}, {sizes}, bias={self.use_bias}{self._formats_repr()}"


def _init_each(init: InitMethod, weights: Tensor) -> None:
    for weight in weights:
        init(weight)


def checked_sizes(m_splits: Sequence[int] | Tensor, groups: int, x: Tensor, layer: str) -> list[int]:
    """Return the sizes of groups as ints; raise if they do not add up to the rows of ``x``."""
    sizes = [int(size) for size in (m_splits.tolist() if isinstance(m_splits, Tensor) else m_splits)]
    rows = x.shape[:-1].numel()
    if len(sizes) != groups or sum(sizes) != rows or min(sizes) < 0:
        raise ValueError(f"{layer}: m_splits must have {groups} numbers >= 0 that add up to {rows} rows, got {sizes}")
    return sizes


class _Alignment(nn.Module):
    """Base class of `Fp8Padding` and `Fp8Unpadding`.

    Args:
        num_gemms: number of groups.
        align_size: rows of a padded group are a multiple of this.
        layers: the layers that will read the rows: by default rows are padded to what their formats need in the recipe
            in force. Without layers, to what the recipe needs at most.
    """

    def __init__(self, num_gemms: int, align_size: int | None = None, *, layers: Sequence[GroupedLinear] = ()) -> None:
        super().__init__()
        for layer in layers:
            if not isinstance(layer, GroupedLinear) or layer.num_gemms != num_gemms:
                raise ValueError(
                    f"{type(self).__name__}: layers must be GroupedLinear with {num_gemms} groups, got {layer}"
                )
        self.num_gemms = num_gemms
        self._align_size = align_size
        self._layers = tuple(layers)  # in a tuple they are not submodules: their parameters are those of the caller

    @property
    def align_size(self) -> int:
        if self._align_size is not None:
            return self._align_size
        if self._layers:
            return math.lcm(*(layer.row_multiple() for layer in self._layers))
        return get_align_size_for_quantization(active_recipe())

    @align_size.setter
    def align_size(self, size: int | None) -> None:
        self._align_size = size

    def _aligned(self, sizes: Sequence[int]) -> list[int]:
        multiple = self.align_size
        return [round_up(size, multiple) for size in sizes]


class Fp8Padding(_Alignment):
    """Adds rows of zeros after each group, up to a multiple of ``align_size``.

    `GroupedLinear` pads by itself. Padding outside does it once for several layers.

    Args:
        num_gemms: number of groups.
        align_size: rows of a padded group are a multiple of this.
        layers: the layers that will read the rows: by default rows are padded to what their formats need in the recipe
            in force. Without layers, to what the recipe needs at most.

    Examples:
        >>> pad, unpad = cg.Fp8Padding(2, align_size=32), cg.Fp8Unpadding(2, align_size=32)
        >>> padded, rows = pad(torch.ones(50, 8), [20, 30])
        >>> padded.shape, rows
        (torch.Size([64, 8]), [32, 32])
    """

    def forward(self, inp: Tensor, m_splits: Sequence[int] | Tensor) -> tuple[Tensor, list[int]]:
        """Return the padded rows [M, K], and the sizes of the padded groups."""
        sizes = checked_sizes(m_splits, self.num_gemms, inp, type(self).__name__)
        padded = self._aligned(sizes)
        return padded_groups(inp.reshape(-1, inp.shape[-1]), sizes, padded, inp.shape[-1]), padded


class Fp8Unpadding(_Alignment):
    """Removes the rows that `Fp8Padding` added.

    Args:
        num_gemms: number of groups.
        align_size: as in `Fp8Padding`.
        layers: as in `Fp8Padding`.

    Examples:
        >>> pad, unpad = cg.Fp8Padding(2, align_size=32), cg.Fp8Unpadding(2, align_size=32)
        >>> padded, _ = pad(torch.ones(50, 8), [20, 30])
        >>> unpad(padded, [20, 30]).shape
        torch.Size([50, 8])
    """

    def forward(self, inp: Tensor, m_splits: Sequence[int] | Tensor) -> Tensor:
        """Return the rows without padding; ``m_splits`` are the sizes of the groups before padding."""
        sizes = [int(size) for size in (m_splits.tolist() if isinstance(m_splits, Tensor) else m_splits)]
        padded = checked_sizes(self._aligned(sizes), self.num_gemms, inp, type(self).__name__)
        if padded == sizes:
            return inp
        return torch.cat([group[:size] for group, size in zip(inp.split(padded), sizes, strict=True)])
