"""Benchmarks: figures for people, as ratios in one run. Not part of the package, not tests."""
