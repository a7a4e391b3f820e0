"""Benchmarks: `python -m vllm_lilicorr.bench NAME ...`, one module of this package a benchmark."""
