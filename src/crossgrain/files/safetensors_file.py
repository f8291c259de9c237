"""Save and load models in safetensors files: quantized bit for bit, or as plain tensors for other programs.

Tensors are named as `flat` describes. The metadata of the file describes them:

    crossgrain.version   version of the naming scheme
    crossgrain.state     formats, quantized tensors, numbers and shared tensors, as JSON
    crossgrain.recipe    the recipe, as text, if there is one
    crossgrain.sha256    checksum of all of the above and of every tensor
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..formats import NewerVersionError
from ..optim.base import MASTER, FusedOptimizer
from ..recipe import Recipe
from ..recipe.extra_state import is_extra_state_key
from ..recipe.portable import recipe_from_text
from ..tensor import QuantizedTensor
from .bound import RecipeChoice, recipe_text
from .description import plain_dtype
from .durable import whole_file
from .flat import VERSION, flatten, unflatten
from .loading import load_state_dict
from .manifest import DamagedFileError

_PREFIX = "crossgrain."
_VERSION, _STATE, _RECIPE, _DIGEST = (f"{_PREFIX}{name}" for name in ("version", "state", "recipe", "sha256"))
_FRAMEWORK = {"format": "pt"}  # which readers of such files look for


@dataclass(frozen=True)
class ModelFile:
    """The contents of a safetensors file.

    Attributes:
        state_dict: plain and quantized tensors by name.
        recipe_text: the recipe as text, or None if none was saved.
        metadata: the entries of the file's metadata that are not crossgrain's.

    Examples:
        >>> import tempfile
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 32))
        >>> _ = cg.convert(model, "mxfp8")
        >>> with tempfile.TemporaryDirectory() as root:
        ...     cg.files.save_safetensors(model, f"{root}/model.safetensors")
        ...     file = cg.files.read_safetensors(f"{root}/model.safetensors")
        >>> print(file.recipe())
        fprop: mxfp8, dgrad: mxfp8, wgrad: mxfp8
    """

    state_dict: dict[str, Any]
    recipe_text: str | None
    metadata: dict[str, str]

    def recipe(self, *, import_functions: bool = False) -> Recipe | None:
        """Return the recipe that was saved, or None.

        Args:
            import_functions: allow importing the modules of functions that the recipe names, which runs their code.
                Set it only if you trust the file.
        """
        if self.recipe_text is None:
            return None
        return recipe_from_text(self.recipe_text, import_functions=import_functions)


def save_safetensors(
    model: nn.Module | Mapping[str, Any],
    path: str | os.PathLike[str],
    *,
    recipe: RecipeChoice = "bound",
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a model to a safetensors file. Quantized tensors are stored as their bytes, without loss.

    Args:
        model: a module, or a state dict.
        path: the file to write; an existing file is replaced when the new one is complete.
        recipe: the recipe to store, as a recipe or its text. By default the recipe that the model was converted with;
            None stores none.
        metadata: your own entries for the metadata of the file. Keys must not start with ``crossgrain.``.

    Raises:
        TypeError, ValueError: something in the state dict cannot be stored.
        OSError: the file cannot be written.

    Examples:
        >>> import tempfile
        >>> with cg.quantized_model_init(recipe="mxfp8"):
        ...     model = torch.nn.Sequential(cg.Linear(32, 32))
        >>> with tempfile.TemporaryDirectory() as root:
        ...     cg.files.save_safetensors(model, f"{root}/model.safetensors")
        ...     type(cg.files.read_safetensors(f"{root}/model.safetensors").state_dict["0.weight"])
        <class 'crossgrain.quantizers.mxfp8.MXFP8Tensor'>
    """
    flat = flatten(model.state_dict() if isinstance(model, nn.Module) else model)
    about = {**_FRAMEWORK, **_own(metadata), _VERSION: str(VERSION), _STATE: json.dumps(flat.description())}
    text = recipe_text(recipe, [model])
    if text is not None:
        about[_RECIPE] = text
    _write(flat.buffers, path, {**about, _DIGEST: _digest(flat.buffers, about)})


def read_safetensors(path: str | os.PathLike[str], *, verify: bool = True) -> ModelFile:
    """Read a file written by `save_safetensors`, or any safetensors file of plain tensors.

    Args:
        path: the file to read.
        verify: check the checksum, which reads the whole file.

    Raises:
        FileNotFoundError: there is no such file.
        DamagedFileError: the file is truncated, modified, inconsistent, or of an unknown version.

    Examples:
        >>> import tempfile
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 32))
        >>> with tempfile.TemporaryDirectory() as root:
        ...     cg.files.save_safetensors(model, f"{root}/model.safetensors")
        ...     sorted(cg.files.read_safetensors(f"{root}/model.safetensors").state_dict)
        ['0.bias', '0.weight']
    """
    buffers, metadata = _read(Path(path))
    about = {key: value for key, value in metadata.items() if key.startswith(_PREFIX)}
    others = {key: value for key, value in metadata.items() if key not in about}
    if not about:
        return ModelFile(dict(buffers), None, others)
    if about.get(_VERSION) != str(VERSION):
        raise DamagedFileError(
            f"{path} has the unknown version {about.get(_VERSION)!r} of crossgrain's naming scheme; this crossgrain "
            f"reads version {VERSION}"
        )
    if verify and about.pop(_DIGEST, None) != _digest(buffers, {**others, **about}):
        raise DamagedFileError(f"{path} is damaged: its contents do not match its checksum")
    try:
        state = unflatten(buffers, json.loads(about[_STATE]))
    except NewerVersionError as error:
        raise NewerVersionError(f"{path}: {error}") from error
    except Exception as error:  # what somebody has changed can be anything
        raise DamagedFileError(
            f"{path} is inconsistent: its tensors do not fit its metadata: {type(error).__name__}: {error}"
        ) from error
    return ModelFile(state, about.get(_RECIPE), others)


def load_safetensors(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    strict: bool = True,
    assign: bool = False,
    requantize: bool = False,
    verify: bool = True,
) -> ModelFile:
    """Load a safetensors file into a model. If it fails, the model is unchanged.

    Args:
        path: a file written by `save_safetensors`, or any safetensors file of plain tensors.
        model: the module to load into.
        strict: as in `load_state_dict`.
        assign: as in `load_state_dict`.
        requantize: as in `load_state_dict`.
        verify: check the checksum, which reads the whole file.

    Returns:
        The contents of the file.

    Examples:
        >>> import tempfile
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 32))
        >>> with tempfile.TemporaryDirectory() as root:
        ...     cg.files.save_safetensors(model, f"{root}/model.safetensors")
        ...     file = cg.files.load_safetensors(f"{root}/model.safetensors", model)
        >>> sorted(file.state_dict)
        ['0.bias', '0.weight']
    """
    file = read_safetensors(path, verify=verify)
    load_state_dict(model, file.state_dict, strict=strict, assign=assign, requantize=requantize)
    return file


def export_plain(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = torch.bfloat16,
    optimizer: torch.optim.Optimizer | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write the model as plain, unquantized tensors to a safetensors file that any program can read.

    Quantized parameters are decoded: these are the numbers that the model computes with. Extra states (histories of
    delayed scaling) are left out.

    Args:
        model: the module to export.
        path: the file to write.
        dtype: dtype of all floating-point tensors; None keeps the dtype of each tensor.
        optimizer: write the float32 master weights of this optimizer instead, for parameters that have them.
        metadata: your own entries for the metadata of the file.

    Raises:
        ValueError: the optimizer has no master weights of this model, or a number is too large for ``dtype``.

    Examples:
        >>> import tempfile
        >>> with cg.quantized_model_init(recipe="mxfp8"):
        ...     model = torch.nn.Sequential(cg.Linear(32, 32))
        >>> with tempfile.TemporaryDirectory() as root:
        ...     cg.files.export_plain(model, f"{root}/plain.safetensors")
        ...     cg.files.read_safetensors(f"{root}/plain.safetensors").state_dict["0.weight"].dtype
        torch.bfloat16
    """
    _write(plain_tensors(model, dtype, optimizer), path, {**_FRAMEWORK, **_own(metadata)})


def plain_tensors(
    model: nn.Module, dtype: torch.dtype | None, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Tensor]:
    """The tensors that `export_plain` writes, by name."""
    masters = {} if optimizer is None else _masters(model, optimizer)
    plain: dict[str, Tensor] = {}
    for key, value in model.state_dict().items():
        if isinstance(value, Tensor) and not is_extra_state_key(key):
            wanted = dtype if dtype is not None and value.is_floating_point() else value.dtype
            plain[key] = cast_tensor(key, masters.get(key, value), wanted)
    return plain


def _masters(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if MASTER not in optimizer.state.get(param, {}):
            continue
        if isinstance(optimizer, FusedOptimizer):
            found[name] = optimizer.get_unscaled_state(param, MASTER)
        else:
            found[name] = optimizer.state[param][MASTER]
    if not found:
        raise ValueError(f"this {type(optimizer).__name__} has no master weights of any parameter of this model")
    return found


def cast_tensor(key: str, value: Tensor, dtype: torch.dtype) -> Tensor:
    """A contiguous copy on the CPU in ``dtype``; quantized tensors are decoded.

    Raises:
        ValueError: a number is too large for ``dtype``.
    """
    value = value.detach()
    plain = value.dequantize(dtype=torch.float32) if isinstance(value, QuantizedTensor) else value
    cast = plain.to(device="cpu", dtype=dtype, copy=True).contiguous()
    if dtype.is_floating_point and bool((cast.isinf() & plain.cpu().isfinite()).any()):
        raise ValueError(f"{key} holds numbers beyond the range of {plain_dtype(dtype)}; export with a wider dtype")
    return cast


def _own(metadata: Mapping[str, str] | None) -> dict[str, str]:
    for key in metadata or {}:
        if key.startswith(_PREFIX):
            raise ValueError(
                f"metadata keys that start with {_PREFIX!r} are reserved for crossgrain: {key!r}. Use another key"
            )
    return dict(metadata or {})


def _digest(buffers: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name in sorted(buffers):
        buffer = buffers[name]
        digest.update(json.dumps([name, plain_dtype(buffer.dtype), list(buffer.shape)]).encode())
        digest.update(buffer.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _write(buffers: Mapping[str, Tensor], path: str | os.PathLike[str], metadata: dict[str, str]) -> None:
    safetensors = safetensors_package()
    with whole_file(path) as temporary:
        try:
            safetensors.torch.save_file(dict(buffers), temporary, metadata)
        except safetensors.SafetensorError as error:
            raise OSError(f"{path} could not be written: {error}") from error


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    safetensors = safetensors_package()
    if not path.is_file():
        raise FileNotFoundError(f"the file {path} does not exist")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (safetensors.SafetensorError, OSError) as error:
        raise DamagedFileError(f"{path} is truncated or not a safetensors file: {error}") from error


def safetensors_package() -> Any:
    """The package safetensors; an ImportError says how to install it."""
    try:
        import safetensors
        import safetensors.torch
    except ImportError:
        raise ImportError(
            "reading and writing safetensors files needs the package safetensors: pip install 'crossgrain[safetensors]'"
        ) from None
    return safetensors
