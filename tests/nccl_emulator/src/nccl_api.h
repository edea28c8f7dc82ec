/* The part of NCCL's C interface that the emulator offers, as its user guide states
 * it (https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api.html), and what
 * the emulator adds to it. */
#ifndef NCCL_API_H
#define NCCL_API_H

#include <stddef.h>

#define NCCL_UNIQUE_ID_BYTES 128
#define NCCL_SPLIT_NOCOLOR (-1)
#define EMULATED_VERSION 22707

typedef struct ncclComm *ncclComm_t;
typedef struct CUstream_st *cudaStream_t;

typedef struct {
    char internal[NCCL_UNIQUE_ID_BYTES];
} ncclUniqueId;

typedef enum {
    ncclSuccess = 0,
    ncclUnhandledCudaError = 1,
    ncclSystemError = 2,
    ncclInternalError = 3,
    ncclInvalidArgument = 4,
    ncclInvalidUsage = 5,
    ncclRemoteError = 6,
    ncclInProgress = 7,
} ncclResult_t;

typedef enum {
    ncclSum = 0,
    ncclProd = 1,
    ncclMax = 2,
    ncclMin = 3,
    ncclAvg = 4,
    ncclNumOps = 5,
} ncclRedOp_t;

typedef enum {
    ncclInt8 = 0,
    ncclUint8 = 1,
    ncclInt32 = 2,
    ncclUint32 = 3,
    ncclInt64 = 4,
    ncclUint64 = 5,
    ncclFloat16 = 6,
    ncclFloat32 = 7,
    ncclFloat64 = 8,
    ncclBfloat16 = 9,
    ncclNumTypes = 10,
} ncclDataType_t;

/* The first fields of ncclConfig_t, which are the same in all versions. Every call of
 * the emulator is blocking, which NCCL allows whatever the configuration asks for. */
#define NCCL_CONFIG_MAGIC 0xcafebeefu
typedef struct {
    size_t size;
    unsigned int magic;
    unsigned int version;
    int blocking;
} ncclConfig_t;

#define EXPORT __attribute__((visibility("default")))

EXPORT ncclResult_t ncclGetVersion(int *version);
EXPORT ncclResult_t ncclGetUniqueId(ncclUniqueId *id);
EXPORT ncclResult_t ncclCommInitRank(ncclComm_t *comm, int nranks, ncclUniqueId id,
                                     int rank);
EXPORT ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int nranks,
                                           ncclUniqueId id, int rank,
                                           ncclConfig_t *config);
EXPORT ncclResult_t ncclCommInitAll(ncclComm_t *comms, int ndev, const int *devices);
EXPORT ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key,
                                  ncclComm_t *newcomm, ncclConfig_t *config);
EXPORT ncclResult_t ncclCommFinalize(ncclComm_t comm);
EXPORT ncclResult_t ncclCommDestroy(ncclComm_t comm);
EXPORT ncclResult_t ncclCommAbort(ncclComm_t comm);
EXPORT ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error);
EXPORT const char *ncclGetErrorString(ncclResult_t result);
EXPORT const char *ncclGetLastError(ncclComm_t comm);
EXPORT ncclResult_t ncclCommCount(ncclComm_t comm, int *count);
EXPORT ncclResult_t ncclCommCuDevice(ncclComm_t comm, int *device);
EXPORT ncclResult_t ncclCommUserRank(ncclComm_t comm, int *rank);
EXPORT ncclResult_t ncclAllReduce(const void *sendbuf, void *recvbuf, size_t count,
                                  ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                                  cudaStream_t stream);
EXPORT ncclResult_t ncclReduce(const void *sendbuf, void *recvbuf, size_t count,
                               ncclDataType_t type, ncclRedOp_t op, int root,
                               ncclComm_t comm, cudaStream_t stream);
EXPORT ncclResult_t ncclBcast(void *buf, size_t count, ncclDataType_t type, int root,
                              ncclComm_t comm, cudaStream_t stream);
EXPORT ncclResult_t ncclBroadcast(const void *sendbuf, void *recvbuf, size_t count,
                                  ncclDataType_t type, int root, ncclComm_t comm,
                                  cudaStream_t stream);
EXPORT ncclResult_t ncclReduceScatter(const void *sendbuf, void *recvbuf,
                                      size_t recvcount, ncclDataType_t type,
                                      ncclRedOp_t op, ncclComm_t comm,
                                      cudaStream_t stream);
EXPORT ncclResult_t ncclAllGather(const void *sendbuf, void *recvbuf, size_t sendcount,
                                  ncclDataType_t type, ncclComm_t comm,
                                  cudaStream_t stream);
EXPORT ncclResult_t ncclSend(const void *sendbuf, size_t count, ncclDataType_t type,
                             int peer, ncclComm_t comm, cudaStream_t stream);
EXPORT ncclResult_t ncclRecv(void *recvbuf, size_t count, ncclDataType_t type, int peer,
                             ncclComm_t comm, cudaStream_t stream);
EXPORT ncclResult_t ncclGroupStart(void);
EXPORT ncclResult_t ncclGroupEnd(void);

/* "host": buffers are host memory, and every rank counts as having a device of its
 * own. "device": buffers may be device memory, and several ranks may share a device.
 * NVIDIA's library does not have this function. */
EXPORT const char *ncclEmulatorMemory(void);

#endif
