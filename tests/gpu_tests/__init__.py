"""Checks and timings that need an NVIDIA GPU; run_gpu_tests.py runs them all."""
