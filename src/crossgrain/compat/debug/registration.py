"""Register the features with nvdlfw_inspect. Its ``initialize`` comes here by the file in `features`."""

from __future__ import annotations

from nvdlfw_inspect.registry import Registry

from . import changing_features as changing
from . import log_features as logging
from . import session
from .api import NAMESPACE, TransformerEngineAPI

FEATURES: tuple[type, ...] = (
    logging.LogTensorStats,
    logging.LogFp8TensorStats,
    logging.LogNvfp4TensorStats,
    changing.FakeQuant,
    changing.PerTensorScaling,
    changing.DisableQuantizationGEMM,
    changing.DisableQuantizationLayer,
    changing.DisableFP8GEMM,
    changing.DisableFP8Layer,
    changing.DisableFp8Gemm,
    changing.DisableFp8Layer,
)


def register() -> None:
    """Register the namespace and all features, and look into layers from now on, until ``debug_api.end_debug()``."""
    Registry.register_namespace_api(namespace=NAMESPACE)(TransformerEngineAPI)
    for feature in FEATURES:
        Registry.register_feature(namespace=NAMESPACE)(feature)
    session.start()
