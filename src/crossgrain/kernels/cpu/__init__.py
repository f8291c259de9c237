"""Compiled CPU kernels: numba with explicit SIMD values, bit for bit the reference.

`backend` chooses a kernel (`support`, `encoders`, `decoders`) and runs it on ranges of rows (`runtime`).
Kernels are in `measure`, `rows`, `columns`, `transposed`, `nvfp4_rows`, `nvfp4_columns`, `fp8_tiles` and
`decode`; they are written with the vector type of `simd` and `tiles`, the arithmetic of `elements`,
`random_bits` and `nvfp4_blocks`, and specialised by `tags`.
"""
