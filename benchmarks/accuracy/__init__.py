"""What reuse costs in accuracy: the experiments of the paper's sections 3 and 5, on small and on real models."""
