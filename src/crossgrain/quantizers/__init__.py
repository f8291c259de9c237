"""Making quantized tensors: one file for each format, the hybrid of two, formats by name, groups of tensors."""
