/* The part of the CUDA runtime that the emulator's CUDA build calls, on host memory,
 * to test the order of its copies where there is no GPU.
 *
 * A device pointer is a host pointer with a bit that makes it unusable on the host. A
 * copy is done when its stream is synchronised and not before: a build that forgets to
 * synchronise, or that uses pinned memory again too early, moves wrong data. */
#include <cuda_runtime_api.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define DEVICE_BIT ((uintptr_t)1 << 62)
#define VISIBLE __attribute__((visibility("default")))

enum { MAX_COPIES = 64 };
static _Thread_local struct copy {
    void *to;
    const void *from;
    size_t nbytes;
    cudaStream_t stream;
} copies[MAX_COPIES];
static _Thread_local int n_copies;

static void *on_host(const void *pointer)
{
    return (void *)((uintptr_t)pointer & ~DEVICE_BIT);
}

VISIBLE cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t nbytes,
                                    enum cudaMemcpyKind kind, cudaStream_t stream)
{
    const int n_device =
        ((uintptr_t)to & DEVICE_BIT ? 1 : 0) + ((uintptr_t)from & DEVICE_BIT ? 1 : 0);
    if (kind != cudaMemcpyDefault || n_device != 1 || n_copies == MAX_COPIES)
        return cudaErrorInvalidValue;
    copies[n_copies++] = (struct copy){to, from, nbytes, stream};
    return cudaSuccess;
}

VISIBLE cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    int n_left = 0;
    for (int i = 0; i < n_copies; i++) {
        if (copies[i].stream == stream)
            memcpy(on_host(copies[i].to), on_host(copies[i].from), copies[i].nbytes);
        else
            copies[n_left++] = copies[i];
    }
    n_copies = n_left;
    return cudaSuccess;
}

VISIBLE cudaError_t cudaHostAlloc(void **memory, size_t nbytes, unsigned int flags)
{
    (void)flags;
    *memory = malloc(nbytes);
    return *memory == NULL ? cudaErrorMemoryAllocation : cudaSuccess;
}

VISIBLE cudaError_t cudaFreeHost(void *memory)
{
    free(memory);
    return cudaSuccess;
}

VISIBLE cudaError_t cudaGetDevice(int *device)
{
    *device = 0;
    return cudaSuccess;
}

VISIBLE const char *cudaGetErrorString(cudaError_t error)
{
    return error == cudaSuccess ? "no error" : "pretended error";
}
