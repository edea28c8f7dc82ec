/* NCCL's functions around the library and the life of communicators. */
#include <string.h>

#include "emulator.h"

/* ---- the library ---- */

ncclResult_t ncclGetVersion(int *version)
{
    if (version == NULL)
        return refuse(ncclInvalidArgument, "ncclGetVersion: version is NULL");
    *version = pretended_version();
    return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t result)
{
    switch (result) {
    case ncclSuccess: return "no error";
    case ncclUnhandledCudaError: return "unhandled cuda error (emulated)";
    case ncclSystemError: return "unhandled system error (emulated)";
    case ncclInternalError: return "internal error (emulated)";
    case ncclInvalidArgument: return "invalid argument (emulated)";
    case ncclInvalidUsage: return "invalid usage (emulated)";
    case ncclRemoteError:
        return "remote process exited or there was a network error (emulated)";
    case ncclInProgress: return "NCCL operation in progress (emulated)";
    default: return "unknown result code";
    }
}

const char *ncclGetLastError(ncclComm_t comm)
{
    (void)comm;
    return last_error();
}

const char *ncclEmulatorMemory(void)
{
    return memory_kind;
}

/* ---- making communicators ---- */

_Static_assert(sizeof(struct shared_file) <= sizeof(ncclUniqueId), "it is the id");

ncclResult_t ncclGetUniqueId(ncclUniqueId *id)
{
    ncclResult_t status = ncclSuccess;
    struct shared_file where;
    if (id == NULL)
        return refuse(ncclInvalidArgument, "ncclGetUniqueId: id is NULL");
    delay(NULL);
    if (next_fault(CALL_GET_UNIQUE_ID, &status) == FAULT_ERROR)
        return status;
    status = create_segment(&where, NULL);
    if (status != ncclSuccess)
        return status;
    memset(id, 0, sizeof *id);
    memcpy(id->internal, &where, sizeof where);
    log_call("op=GetUniqueId comm=%08x", (uint32_t)where.nonce);
    return ncclSuccess;
}

static ncclResult_t init_rank(ncclComm_t *comm, int nranks, const ncclUniqueId *id,
                              int rank)
{
    struct operation_state op = {.call.operation = OP_INIT};
    ncclResult_t status = ncclSuccess;
    if (comm == NULL)
        return refuse(ncclInvalidArgument, "ncclCommInitRank: comm is NULL");
    *comm = NULL;
    if (nranks < 1 || nranks > MAX_RANKS || rank < 0 || rank >= nranks)
        return refuse(ncclInvalidArgument,
                      "ncclCommInitRank: rank %d of %d ranks; from 1 to %d ranks, "
                      "numbered from 0, are possible",
                      rank, nranks, MAX_RANKS);
    set_process_rank(rank);
    delay(NULL);
    if (next_fault(OP_INIT, &status) == FAULT_ERROR)
        return status;
    memcpy(&op.child_file, id->internal, sizeof op.child_file);
    op.child_size = nranks;
    op.child_rank = rank;
    op.result = comm;
    log_call("op=Init comm=%08x rank=%d size=%d group=%d",
             (uint32_t)op.child_file.nonce, rank, nranks, is_in_group());
    return submit(&op);
}

ncclResult_t ncclCommInitRank(ncclComm_t *comm, int nranks, ncclUniqueId id, int rank)
{
    return note(init_rank(comm, nranks, &id, rank));
}

ncclResult_t check_config(const ncclConfig_t *config)
{
    if (config == NULL || config->magic == NCCL_CONFIG_MAGIC)
        return ncclSuccess;
    return refuse(ncclInvalidArgument,
                  "the configuration was not initialised by NCCL_CONFIG_INITIALIZER");
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int nranks, ncclUniqueId id,
                                    int rank, ncclConfig_t *config)
{
    const ncclResult_t status = check_config(config);
    return note(status == ncclSuccess ? init_rank(comm, nranks, &id, rank) : status);
}

ncclResult_t ncclCommInitAll(ncclComm_t *comms, int ndev, const int *devices)
{
    ncclUniqueId id;
    (void)devices;
    if (ndev < 1)
        return note(refuse(ncclInvalidArgument, "ncclCommInitAll: %d devices", ndev));
    if (ndev > 1)
        return note(refuse(ncclInvalidUsage,
                           "ncclCommInitAll: %d devices of one process are not "
                           "emulated; use ncclCommInitRank, one process a rank",
                           ndev));
    const ncclResult_t status = ncclGetUniqueId(&id);
    return note(status == ncclSuccess ? init_rank(comms, 1, &id, 0) : status);
}

/* ---- a communicator's life ---- */

ncclResult_t no_communicator(const char *call)
{
    return refuse(ncclInvalidArgument,
                  "nccl%s: the communicator is NULL or was destroyed", call);
}

ncclResult_t ncclCommFinalize(ncclComm_t handle)
{
    struct communicator *comm = acquire(handle);
    if (comm == NULL)
        return no_communicator("CommFinalize");
    comm->finalized = true;
    release(comm);
    return ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t handle)
{
    return retire(handle, false) == ncclSuccess ? ncclSuccess
                                                : no_communicator("CommDestroy");
}

ncclResult_t ncclCommAbort(ncclComm_t handle)
{
    return retire(handle, true) == ncclSuccess ? ncclSuccess
                                               : no_communicator("CommAbort");
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t handle, ncclResult_t *error)
{
    struct communicator *comm = acquire(handle);
    if (comm == NULL)
        return no_communicator("CommGetAsyncError");
    if (error != NULL)
        *error = failure(comm);
    release(comm);
    return error == NULL ? refuse(ncclInvalidArgument, "error is NULL") : ncclSuccess;
}

enum property { SIZE, RANK, DEVICE };

static ncclResult_t get(ncclComm_t handle, enum property property, int *value)
{
    struct communicator *comm = acquire(handle);
    if (comm == NULL)
        return no_communicator("CommCount, CommUserRank or CommCuDevice");
    if (value != NULL)
        *value = property == SIZE   ? comm->size
                 : property == RANK ? comm->rank
                                    : comm->device;
    release(comm);
    return value == NULL
               ? refuse(ncclInvalidArgument, "the place for the value is NULL")
               : ncclSuccess;
}

ncclResult_t ncclCommCount(ncclComm_t comm, int *count)
{
    return get(comm, SIZE, count);
}

ncclResult_t ncclCommUserRank(ncclComm_t comm, int *rank)
{
    return get(comm, RANK, rank);
}

ncclResult_t ncclCommCuDevice(ncclComm_t comm, int *device)
{
    return get(comm, DEVICE, device);
}
