"""The core of a linear layer, which `nn` and `ops` use: three GEMMs as an autograd function, and what they need."""
