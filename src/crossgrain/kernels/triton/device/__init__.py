"""What runs on the GPU: kernels and the functions that they call. Triton compiles this code; Python does not run it."""
