"""Native GEMMs without a GPU: torch's shape functions, and a twin of its kernel in plain torch."""
