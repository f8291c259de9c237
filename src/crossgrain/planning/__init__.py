"""Estimate what a large training run costs: memory, bytes that GPUs send, time of GEMMs; with all assumptions.

print(crossgrain.plan("llama3-70b", "mxfp8-fwd-nvfp4-bwd", gpus=64, device="b200"))
"""

from .cost import plan
from .devices import DEVICES, Device, device_of
from .layer_estimate import LayerEstimate, gemm_seconds, layer_estimate
from .models import MODELS, Transformer, model_names
from .plane_bytes import Gathered, gathered_bytes
from .result import Memory, Plan, Traffic, Work

__all__ = [
    "DEVICES",
    "MODELS",
    "Device",
    "Gathered",
    "LayerEstimate",
    "Memory",
    "Plan",
    "Traffic",
    "Transformer",
    "Work",
    "device_of",
    "gathered_bytes",
    "gemm_seconds",
    "layer_estimate",
    "model_names",
    "plan",
]
