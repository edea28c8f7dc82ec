// The kernels of flat_buffer.cu as a library for the host. Each is found by its name;
// these two run one.

#include "cuda_shim.h"

#include "flat_buffer.cu"

extern "C" void launch_pack(
    void (*kernel)(const Index *, Index, void *, Index, double), unsigned int n_grid,
    unsigned int n_threads, unsigned int first_block, unsigned int n_blocks,
    const Index *table, Index n_rows, void *buffer, Index n_elems, double scale) {
  shim_launch(n_grid, n_threads, first_block, n_blocks, kernel, table, n_rows, buffer,
              n_elems, scale);
}

extern "C" void launch_unpack(void (*kernel)(const Index *, Index, void *, Index),
                              unsigned int n_grid, unsigned int n_threads,
                              unsigned int first_block, unsigned int n_blocks,
                              const Index *table, Index n_rows, void *buffer,
                              Index n_elems) {
  shim_launch(n_grid, n_threads, first_block, n_blocks, kernel, table, n_rows, buffer,
              n_elems);
}
