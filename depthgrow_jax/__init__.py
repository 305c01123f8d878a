"""Depth-grown Transformers in JAX: train them, and measure how they use their depth."""

__version__ = "0.1.0"
