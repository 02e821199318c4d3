"""pdconvert: compile a causal LM into an ANE prefill package and matching MLX decode weights."""

__version__ = "0.1.0"
