"""Those that are packages are run from the root of the checkout: `python -m benchmarks.accuracy.accuracy`."""
