"""What `benchmarks/gpu_check.py` measures: models of the released shapes, and one module per part."""
