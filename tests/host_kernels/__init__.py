"""Running the source of kernels on the host, without a GPU.

The source is compiled as C++ behind ``cuda_shim.h``, which gives it thread indices.
"""
