"""Training over several ranks with FSDP2."""

from .by_pass import gather_by_pass
from .count import GatheredBytes, count_gathered_bytes
from .gather_quantized import GatherReport, gather_quantized

__all__ = ["GatherReport", "GatheredBytes", "count_gathered_bytes", "gather_by_pass", "gather_quantized"]
