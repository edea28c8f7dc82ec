"""Functions of Chainer's kind that work on the arrays of all ranks."""
