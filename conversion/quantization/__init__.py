"""Quantized weights: find them, dequantize them to floats, and quantize floats."""
