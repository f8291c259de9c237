"""Random programs over quantized tensors: after every step, every plane of every live tensor is what the model says."""

from .programs import run_programs
from .tensor_programs import Tensors


def test_programs_over_Tensors(seeds, chosen_steps):
    run_programs(Tensors, seeds, chosen_steps)
