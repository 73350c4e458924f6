"""Measure the power of the tests: how many small defects of the product they notice."""
