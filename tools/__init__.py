"""The gate, the demo and the benchmarks; nothing here is installed with the package."""
