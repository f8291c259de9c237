"""Transformer Engine's debug features: the package ``nvdlfw_inspect`` and its YAML drive crossgrain's modules.

    import nvdlfw_inspect.api as debug_api
    from crossgrain.compat.debug import FEATURES

    debug_api.initialize(config_file="config.yaml", feature_dirs=[FEATURES], log_dir="log")

Nothing here is imported, and modules run as always, until ``initialize`` is called.
"""

from pathlib import Path

FEATURES = str(Path(__file__).parent / "features")
"""The directory for ``feature_dirs``; also that of ``transformer_engine.debug.features``."""

__all__ = ["FEATURES"]
