"""The core of a linear layer, under `nn` and `ops` alike: three GEMMs, and what wraps them."""
