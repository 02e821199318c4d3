"""Quantization grids, the quantized store, and the packing that each half needs."""
