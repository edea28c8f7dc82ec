/* A libnccl.so.2 that moves nothing. It remembers the arguments of the last call, for
 * what cannot be tried on real buffers: counts above 2^31, codes of errors, and missing
 * functions (compile with WITHOUT_SPLIT). A stream below 100 is the code to return. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef struct {
    char internal[128];
} unique_id;

/* send, recv, count, type, op, root, stream; what a call has not stays at -1. */
int64_t recorded[7];
const char *recorded_call;
unsigned char recorded_id[128];
int64_t recorded_split[2];
int async_error;

static int record(const char *call, const void *send, const void *recv, size_t count,
                  int type, int op, int root, void *stream)
{
    int64_t all[7] = {(intptr_t)send, (intptr_t)recv, (int64_t)count, type, op, root,
                      (intptr_t)stream};
    memcpy(recorded, all, sizeof all);
    recorded_call = call;
    return all[6] < 100 ? (int)all[6] : 0;
}

int ncclGetVersion(int *version)
{
    *version = 22707;
    return 0;
}

int ncclGetUniqueId(unique_id *id)
{
    for (int i = 0; i < 128; i++)
        id->internal[i] = (char)(2 * i);
    return 0;
}

const char *ncclGetErrorString(int code)
{
    (void)code;
    return "words of the library";
}

const char *ncclGetLastError(void *comm)
{
    (void)comm;
    return "its last message\n";
}

int ncclCommInitRank(void **comm, int size, unique_id id, int rank)
{
    static char comms[64];
    if (rank >= size)
        return 4;
    memcpy(recorded_id, id.internal, 128);
    *comm = &comms[rank];
    return 0;
}

int ncclCommInitRankConfig(void **comm, int size, unique_id id, int rank, void *config)
{
    (void)config;
    return ncclCommInitRank(comm, size, id, rank);
}

int ncclAllReduce(const void *s, void *r, size_t n, int t, int o, void *c, void *stream)
{
    (void)c;
    return record(__func__, s, r, n, t, o, -1, stream);
}

int ncclReduce(const void *s, void *r, size_t n, int t, int o, int root, void *c,
               void *stream)
{
    (void)c;
    return record(__func__, s, r, n, t, o, root, stream);
}

int ncclBroadcast(const void *s, void *r, size_t n, int t, int root, void *c,
                  void *stream)
{
    (void)c;
    return record(__func__, s, r, n, t, -1, root, stream);
}

int ncclReduceScatter(const void *s, void *r, size_t n, int t, int o, void *c,
                      void *stream)
{
    (void)c;
    return record(__func__, s, r, n, t, o, -1, stream);
}

int ncclAllGather(const void *s, void *r, size_t n, int t, void *c, void *stream)
{
    (void)c;
    return record(__func__, s, r, n, t, -1, -1, stream);
}

int ncclSend(const void *s, size_t n, int t, int peer, void *c, void *stream)
{
    (void)c;
    return record(__func__, s, (void *)-1, n, t, -1, peer, stream);
}

int ncclRecv(void *r, size_t n, int t, int peer, void *c, void *stream)
{
    (void)c;
    return record(__func__, (void *)-1, r, n, t, -1, peer, stream);
}

#ifndef WITHOUT_SPLIT
int ncclCommSplit(void *comm, int color, int key, void **made, void *config)
{
    (void)config;
    recorded_split[0] = color;
    recorded_split[1] = key;
    *made = color < 0 ? NULL : comm;
    return 0;
}
#endif

int ncclCommCount(void *comm, int *count)
{
    (void)comm;
    *count = 5;
    return 0;
}

int ncclCommUserRank(void *comm, int *rank)
{
    (void)comm;
    *rank = 3;
    return 0;
}

int ncclCommGetAsyncError(void *comm, int *code)
{
    (void)comm;
    *code = async_error;
    return 0;
}

#define NOTHING(name)                                                                  \
    int name(void)                                                                     \
    {                                                                                  \
        return 0;                                                                      \
    }
NOTHING(ncclBcast)
NOTHING(ncclCommAbort)
NOTHING(ncclCommCuDevice)
NOTHING(ncclCommDestroy)
NOTHING(ncclCommInitAll)
NOTHING(ncclGroupEnd)
NOTHING(ncclGroupStart)
