"""Running a finished build: tokenize, prefill with the package, hand over, decode with MLX."""
