"""Random programs over training runs: every y, dx, dW, weight, master and moment is what the model says."""

from .module_programs import Modules
from .programs import run_programs


def test_programs_over_Modules(seeds, chosen_steps):
    run_programs(Modules, seeds, chosen_steps)
