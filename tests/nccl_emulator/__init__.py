"""An NCCL library on host memory, its build, and its tests; README.md describes it."""
