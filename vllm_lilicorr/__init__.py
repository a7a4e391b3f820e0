"""LiLiCorr speculative decoding for vLLM, and the four methods it is compared with."""

__version__ = "0.1.0"
