// Lets the source of kernels be compiled as host C++: one thread runs after another.
//
// Right only for kernels whose threads do not wait for each other or share memory,
// which would need more names than there are here.

#define __global__
#define __device__
#define __launch_bounds__(n_threads)

struct ShimDim {
  unsigned int x;
};

static ShimDim gridDim, blockDim, blockIdx, threadIdx;

// Runs every thread of blocks first_block, ..., first_block + n_blocks - 1 of a launch
// of n_grid blocks.
template <class Kernel, class... Args>
void shim_launch(unsigned int n_grid, unsigned int n_threads, unsigned int first_block,
                 unsigned int n_blocks, Kernel kernel, Args... args) {
  gridDim.x = n_grid;
  blockDim.x = n_threads;
  for (unsigned int block = 0; block < n_blocks; ++block) {
    blockIdx.x = first_block + block;
    for (threadIdx.x = 0; threadIdx.x < n_threads; ++threadIdx.x) {
      kernel(args...);
    }
  }
}
