"""What the user asks for: recipes, roles, factories, the per-GEMM language."""
