"""What can be said of compiled kernels without running them on a GPU, and the limits that they must keep."""
