"""Functions of Transformer Engine that crossgrain does in another way: they turn arguments and results around."""
