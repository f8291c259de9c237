"""The checks for GPUs, on the CPU and on an emulated device: they run, they pass, and each of them can fail."""
