/* Buffers in device memory: they pass through pinned host memory, in the order of the
 * stream. Everything else is as in the host build, so that ranks may share a device. */
#include <cuda_runtime_api.h>
#include <string.h>

#include "emulator.h"

const char *const memory_kind = "device";

/* Each thread has its own piece: threads may copy at the same time. */
struct pinned {
    void *memory;
    size_t nbytes;
};
static _Thread_local struct pinned pinned;
static pthread_key_t key;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void free_pinned(void *memory)
{
    cudaFreeHost(memory);
}

static void prepare(void)
{
    pthread_key_create(&key, free_pinned);
}

static cudaError_t provide(size_t nbytes)
{
    pthread_once(&once, prepare);
    if (nbytes <= pinned.nbytes)
        return cudaSuccess;
    cudaFreeHost(pinned.memory);
    pinned = (struct pinned){NULL, 0};
    const cudaError_t error =
        cudaHostAlloc(&pinned.memory, nbytes, cudaHostAllocPortable);
    if (error == cudaSuccess)
        pinned.nbytes = nbytes;
    pthread_setspecific(key, pinned.memory);
    return error;
}

static ncclResult_t as_result(cudaError_t error)
{
    if (error == cudaSuccess)
        return ncclSuccess;
    return refuse(ncclUnhandledCudaError, "CUDA: %s", cudaGetErrorString(error));
}

ncclResult_t copy_in(void *staged, const void *user, size_t nbytes, cudaStream_t stream)
{
    cudaError_t error = provide(nbytes);
    if (error == cudaSuccess)
        error = cudaMemcpyAsync(pinned.memory, user, nbytes, cudaMemcpyDefault, stream);
    if (error == cudaSuccess)
        error = cudaStreamSynchronize(stream);
    if (error == cudaSuccess)
        memcpy(staged, pinned.memory, nbytes);
    return as_result(error);
}

ncclResult_t copy_out(void *user, const void *staged, size_t nbytes,
                      cudaStream_t stream)
{
    cudaError_t error = provide(nbytes);
    if (error == cudaSuccess) {
        memcpy(pinned.memory, staged, nbytes);
        error = cudaMemcpyAsync(user, pinned.memory, nbytes, cudaMemcpyDefault, stream);
    }
    /* The pinned memory is used again. */
    if (error == cudaSuccess)
        error = cudaStreamSynchronize(stream);
    return as_result(error);
}

int current_device(int rank)
{
    int device;
    (void)rank;
    return cudaGetDevice(&device) == cudaSuccess ? device : -1;
}
