"""Programs of one process each; every one runs under a time limit of its own."""
