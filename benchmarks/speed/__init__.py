"""Time to first token of stock, of every way to reuse, and of what cannot be avoided: `benchmarks/ttft.py`."""
