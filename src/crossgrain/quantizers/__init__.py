"""Quantizers make quantized tensors: one module for each format, hybrids of two, formats by name, groups of tensors."""
