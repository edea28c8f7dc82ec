"""How bytes move inside one group of ranks. The only part that imports mpi4py."""
