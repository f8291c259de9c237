"""Native GEMMs: products of codes by the tensor cores of GPUs, by torch's ``scaled_mm``, without decoding.

`rules` says which operands torch and the hardware take, `arguments` makes the arguments, and `routes` says for any
operands how they would be multiplied, also without a GPU.
"""

from .arguments import scaled_call
from .gpu import Gpu, gpu_of, machine
from .routes import Route, explain, route
from .rules import needs_epilogue, refuses

__all__ = ["Gpu", "Route", "explain", "gpu_of", "machine", "needs_epilogue", "refuses", "route", "scaled_call"]
