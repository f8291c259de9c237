"""Check the settings of features before anything runs: what is unknown raises, what has no effect is warned about."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ...gemm.operands import GEMMS
from ...runtime.logs import warn
from .fake_quant import check_quant_format
from .stat_names import fp8_stat, nvfp4_stat, tensor_stat
from .steps import STEP_KEYS
from .tensors import OPERANDS, TENSORS, gemms_with

_LOG_KEYS = ("stats", *STEP_KEYS)


class ConfigurationError(ValueError):
    """The configuration of debug features asks for something that does not exist."""


def check_features(features: Mapping[str, Any], layers: str) -> None:
    """Check the features of one section of a configuration.

    Args:
        features: the settings by the name of the feature. Those of users are not checked.
        layers: which layers they are for, for messages.

    Raises:
        ConfigurationError: a key, tensor, GEMM, statistic or format does not exist, or a value is wrong.
    """
    for name, settings in features.items():
        if not isinstance(settings, Mapping) or "enabled" not in settings:
            raise ConfigurationError(f"{name} for layers {layers}: 'enabled: True' or 'enabled: False' is missing")
        check = _CHECKS.get(name)
        if check is None or not settings["enabled"]:
            continue
        try:
            check({key: value for key, value in settings.items() if key != "enabled"}, f"{name} for layers {layers}")
        except ValueError as error:
            raise ConfigurationError(f"{name} for layers {layers}: {error}") from error


# ---- structure -----------------------------------------------------------------------------------------------


def _known_keys(settings: Mapping[str, Any], known: Sequence[str]) -> None:
    unknown = [key for key in settings if key not in known]
    if unknown:
        raise ValueError(f"there is no setting {unknown[0]!r}; there are {', '.join(known)}")


def _alternatives(settings: Mapping[str, Any], what: str, known: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The names in ``tensors`` or ``tensors_struct`` (``gemms``, ...), each with the settings for it."""
    plain, struct = f"{what}s", f"{what}s_struct"
    if (plain in settings) == (struct in settings):
        raise ValueError(f"it needs either {plain}, a list of names, or {struct}, a list of mappings with '{what}'")
    rest = {key: value for key, value in settings.items() if key not in (plain, struct)}
    given = settings[plain] if plain in settings else settings[struct]
    if not isinstance(given, list) or not given:
        raise ValueError(f"{plain if plain in settings else struct} must be a list that is not empty, got {given!r}")
    for item in given:
        if struct in settings and (not isinstance(item, Mapping) or what not in item):
            raise ValueError(f"each item of {struct} must be a mapping with '{what}', got {item!r}")
        name = item if plain in settings else item[what]
        if name not in known:
            raise ValueError(f"it has no {what} {name!r}, only {', '.join(known)}")
        own = {} if plain in settings else {key: value for key, value in item.items() if key != what}
        yield name, {**rest, **own}


# ---- features ------------------------------------------------------------------------------------------------


def _check_logging(tensors: Sequence[str], stat: Callable[[Any, str], Any]) -> Callable[[Mapping[str, Any], str], None]:
    def check(settings: Mapping[str, Any], where: str) -> None:
        for tensor, own in _alternatives(settings, "tensor", tensors):
            _known_keys(own, _LOG_KEYS)
            if not isinstance(own.get("stats"), list) or not own["stats"]:
                raise ValueError(f"stats of {tensor} must be a list that is not empty, got {own.get('stats')!r}")
            for each in own["stats"]:
                stat(each, tensor)
            _check_steps(own)

    return check


def _check_steps(settings: Mapping[str, Any]) -> None:
    freq = settings.get("freq", 1)
    if not _is_count(freq) or freq < 1:
        raise ValueError(f"freq must be a number of steps, at least 1, got {freq!r}")
    for key in ("start_step", "end_step"):
        if settings.get(key) is not None and not _is_count(settings[key]):
            raise ValueError(f"{key} must be a step, got {settings[key]!r}")
    spans = settings.get("start_end_list")
    if spans is None:
        return
    pairs = isinstance(spans, list) and all(isinstance(span, list | tuple) and len(span) == 2 for span in spans)
    if not pairs or not all(_is_count(step) for span in spans for step in span):
        raise ValueError(f"start_end_list must be a list of pairs of steps, as [[0, 20], [80, 100]], got {spans!r}")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_changing(
    tensors: Sequence[str], keys: Sequence[str], check_own: Callable[[Mapping[str, Any]], Any]
) -> Callable[[Mapping[str, Any], str], None]:
    def check(settings: Mapping[str, Any], where: str) -> None:
        used: dict[str, bool] = {}
        for gemm, of_gemm in _alternatives(settings, "gemm", tuple(GEMMS)):
            for tensor, own in _alternatives(of_gemm, "tensor", tensors):
                _known_keys(own, keys)
                check_own(own)
                used[tensor] = used.get(tensor, False) or gemm in gemms_with(tensor)
        for tensor in [tensor for tensor, found in used.items() if not found]:
            warn(
                __name__,
                f"{where}: {tensor} has no effect, because no GEMM that is named with it reads or makes it; "
                f"{' and '.join(gemms_with(tensor))} would",
            )

    return check


def _check_fake_quant(settings: Mapping[str, Any]) -> None:
    if "quant_format" not in settings:
        raise ValueError("quant_format is missing")
    check_quant_format(settings["quant_format"], _checked_margin(settings))


def _checked_margin(settings: Mapping[str, Any]) -> int:
    margin: Any = settings.get("margin", 0)
    if not _is_count(margin):
        raise ValueError(f"margin must be a whole number, got {margin!r}")
    return int(margin)


def _check_disabled_gemms(settings: Mapping[str, Any], where: str) -> None:
    for _, own in _alternatives(settings, "gemm", tuple(GEMMS)):
        _known_keys(own, ())


def _check_disabled_layer(settings: Mapping[str, Any], where: str) -> None:
    if settings:
        raise ValueError(f"it takes no settings beside 'enabled', got {', '.join(settings)}")


_CHECKS: dict[str, Callable[[Mapping[str, Any], str], None]] = {
    "LogTensorStats": _check_logging(TENSORS, tensor_stat),
    "LogFp8TensorStats": _check_logging(tuple(OPERANDS), lambda given, tensor: fp8_stat(given)),
    "LogNvfp4TensorStats": _check_logging(tuple(OPERANDS), lambda given, tensor: nvfp4_stat(given)),
    "FakeQuant": _check_changing(TENSORS, ("quant_format", "margin"), _check_fake_quant),
    "PerTensorScaling": _check_changing(tuple(OPERANDS), ("margin",), _checked_margin),
    **dict.fromkeys(("DisableQuantizationGEMM", "DisableFP8GEMM", "DisableFp8Gemm"), _check_disabled_gemms),
    **dict.fromkeys(("DisableQuantizationLayer", "DisableFP8Layer", "DisableFp8Layer"), _check_disabled_layer),
}
LOGGING = ("LogTensorStats", "LogFp8TensorStats", "LogNvfp4TensorStats")
