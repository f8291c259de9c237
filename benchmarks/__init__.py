"""``python -m benchmarks``: how long the kernels, small calls and whole layers take, beside what others need."""
