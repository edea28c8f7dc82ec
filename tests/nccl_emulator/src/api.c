/* NCCL's functions: arguments are checked, faults happen, and calls become operations. */
#include <inttypes.h>
#include <stdio.h>
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
    log_call("op=Init comm=%08x rank=%d size=%d group=%d", (uint32_t)op.child_file.nonce,
             rank, nranks, is_in_group());
    return submit(&op);
}

ncclResult_t ncclCommInitRank(ncclComm_t *comm, int nranks, ncclUniqueId id, int rank)
{
    return note(init_rank(comm, nranks, &id, rank));
}

static ncclResult_t check_config(const ncclConfig_t *config)
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

/* ---- calls on a communicator ---- */

static ncclResult_t no_communicator(const char *call)
{
    return refuse(ncclInvalidArgument,
                  "nccl%s: the communicator is NULL or was destroyed", call);
}

static void log_fault(const struct operation_state *op, const char *fault,
                      ncclResult_t code)
{
    log_call("op=%s comm=%s rank=%d size=%d fault=%s code=%d",
             operation_names[op->call.operation], op->comm->name, op->comm->rank,
             op->comm->size, fault, code);
}

/* Do what comes before every operation: find its communicator, be slow, fail. A fault
 * that leaves nothing to do sets *done. */
static ncclResult_t enter(struct operation_state *op, bool *done)
{
    const char *name = operation_names[op->call.operation];
    ncclResult_t code = ncclSuccess, status;
    op->comm = acquire(op->handle);
    if (op->comm == NULL)
        return no_communicator(name);
    delay(op->comm);
    status = failure(op->comm);
    if (status == ncclSuccess && op->comm->finalized)
        status = refuse(ncclInvalidUsage, "nccl%s: the communicator was finalized", name);
    if (status == ncclSuccess)
        switch (next_fault(op->call.operation, &code)) {
        case FAULT_ERROR:
            log_fault(op, "error", code);
            status = code;
            break;
        case FAULT_ASYNC:
            log_fault(op, "async", code);
            atomic_store(&op->comm->async_error, (int)code);
            *done = true;
            break;
        case FAULT_HANG:
            log_fault(op, "hang", ncclSuccess);
            op->hangs = true;
            break;
        case FAULT_NONE: break;
        }
    return status;
}

static bool overlaps(const char *a, size_t a_bytes, const char *b, size_t b_bytes)
{
    return a < b + b_bytes && b < a + a_bytes;
}

/* NCCL leaves the result open when buffers overlap otherwise than in place. */
static ncclResult_t check_overlap(const struct operation_state *op)
{
    const struct call *call = &op->call;
    const size_t size = (size_t)op->comm->size, rank = (size_t)op->comm->rank;
    const size_t nbytes = call->count * type_bytes(call->type);
    const char *send = op->sendbuf, *recv = op->recvbuf;
    size_t send_bytes = nbytes, recv_bytes = nbytes;
    bool is_in_place = send == recv;
    if (call->operation == OP_REDUCE_SCATTER) {
        send_bytes *= size;
        is_in_place = recv == send + rank * nbytes;
    } else if (call->operation == OP_ALL_GATHER) {
        recv_bytes *= size;
        is_in_place = send == recv + rank * nbytes;
    }
    if (is_in_place || !overlaps(send, send_bytes, recv, recv_bytes))
        return ncclSuccess;
    return refuse(ncclInvalidUsage,
                  "nccl%s: the buffers overlap, but not as an operation in place has it",
                  operation_names[call->operation]);
}

/* reads, writes: whether this rank's send and receive buffers are used. */
static ncclResult_t check_call(const struct operation_state *op, bool reads, bool writes)
{
    const struct call *call = &op->call;
    const char *name = operation_names[call->operation];
    if (call->type < 0 || call->type >= ncclNumTypes)
        return refuse(ncclInvalidArgument, "nccl%s: unknown type %d", name, call->type);
    if (call->redop < 0 || call->redop >= ncclNumOps)
        return refuse(ncclInvalidArgument, "nccl%s: unknown operator %d", name,
                      call->redop);
    if (call->root < 0 || call->root >= op->comm->size)
        return refuse(ncclInvalidArgument, "nccl%s: root or peer %d of %d ranks", name,
                      call->root, op->comm->size);
    if (call->count > SIZE_MAX / type_bytes(call->type) / (size_t)op->comm->size)
        return refuse(ncclInvalidArgument, "nccl%s: count %" PRIu64, name, call->count);
    if (call->count > 0 &&
        ((reads && op->sendbuf == NULL) || (writes && op->recvbuf == NULL)))
        return refuse(ncclInvalidArgument, "nccl%s: a buffer is NULL", name);
    return reads && writes ? check_overlap(op) : ncclSuccess;
}

static ncclResult_t check_own_message(struct operation_state *op)
{
    op->is_to_self = op->call.root == op->comm->rank;
    if (!op->is_to_self || is_in_group())
        return ncclSuccess;
    return refuse(ncclInvalidUsage,
                  "nccl%s: a message to oneself needs its other half in the same group",
                  operation_names[op->call.operation]);
}

static ncclResult_t check(struct operation_state *op)
{
    const bool is_root = op->call.root == op->comm->rank;
    ncclResult_t status;
    switch (op->call.operation) {
    case OP_REDUCE: return check_call(op, true, is_root);
    case OP_BROADCAST: return check_call(op, is_root, true);
    case OP_SEND: status = check_call(op, true, false); break;
    case OP_RECV: status = check_call(op, false, true); break;
    default: return check_call(op, true, true);
    }
    return status == ncclSuccess ? check_own_message(op) : status;
}

static ncclResult_t call(struct operation_state *op)
{
    bool done = false;
    ncclResult_t status = enter(op, &done);
    if (status == ncclSuccess && !done && op->call.operation != OP_SPLIT)
        status = check(op);
    if (op->comm != NULL)
        release(op->comm);
    if (status == ncclSuccess && !done)
        status = submit(op);
    return note(status);
}

ncclResult_t ncclAllReduce(const void *sendbuf, void *recvbuf, size_t count,
                           ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                           cudaStream_t stream)
{
    return call(&(struct operation_state){
        .call = {.operation = OP_ALL_REDUCE, .type = type, .redop = op, .count = count},
        .handle = comm, .sendbuf = sendbuf, .recvbuf = recvbuf, .stream = stream});
}

ncclResult_t ncclReduce(const void *sendbuf, void *recvbuf, size_t count,
                        ncclDataType_t type, ncclRedOp_t op, int root, ncclComm_t comm,
                        cudaStream_t stream)
{
    return call(&(struct operation_state){
        .call = {.operation = OP_REDUCE, .type = type, .redop = op, .root = root,
                 .count = count},
        .handle = comm, .sendbuf = sendbuf, .recvbuf = recvbuf, .stream = stream});
}

ncclResult_t ncclBroadcast(const void *sendbuf, void *recvbuf, size_t count,
                           ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream)
{
    return call(&(struct operation_state){
        .call = {.operation = OP_BROADCAST, .type = type, .root = root, .count = count},
        .handle = comm, .sendbuf = sendbuf, .recvbuf = recvbuf, .stream = stream});
}

ncclResult_t ncclBcast(void *buf, size_t count, ncclDataType_t type, int root,
                       ncclComm_t comm, cudaStream_t stream)
{
    return ncclBroadcast(buf, buf, count, type, root, comm, stream);
}

ncclResult_t ncclReduceScatter(const void *sendbuf, void *recvbuf, size_t recvcount,
                               ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                               cudaStream_t stream)
{
    return call(&(struct operation_state){
        .call = {.operation = OP_REDUCE_SCATTER, .type = type, .redop = op,
                 .count = recvcount},
        .handle = comm, .sendbuf = sendbuf, .recvbuf = recvbuf, .stream = stream});
}

ncclResult_t ncclAllGather(const void *sendbuf, void *recvbuf, size_t sendcount,
                           ncclDataType_t type, ncclComm_t comm, cudaStream_t stream)
{
    return call(&(struct operation_state){
        .call = {.operation = OP_ALL_GATHER, .type = type, .count = sendcount},
        .handle = comm, .sendbuf = sendbuf, .recvbuf = recvbuf, .stream = stream});
}

ncclResult_t ncclSend(const void *sendbuf, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream)
{
    return call(&(struct operation_state){
        .call = {.operation = OP_SEND, .type = type, .root = peer, .count = count},
        .handle = comm, .sendbuf = sendbuf, .stream = stream});
}

ncclResult_t ncclRecv(void *recvbuf, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream)
{
    return call(&(struct operation_state){
        .call = {.operation = OP_RECV, .type = type, .root = peer, .count = count},
        .handle = comm, .recvbuf = recvbuf, .stream = stream});
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *newcomm,
                           ncclConfig_t *config)
{
    if (newcomm == NULL)
        return note(refuse(ncclInvalidArgument, "ncclCommSplit: newcomm is NULL"));
    *newcomm = NULL;
    if (color < NCCL_SPLIT_NOCOLOR)
        return note(refuse(ncclInvalidArgument, "ncclCommSplit: color %d", color));
    if (check_config(config) != ncclSuccess)
        return note(ncclInvalidArgument);
    return call(&(struct operation_state){
        .call = {.operation = OP_SPLIT, .color = color, .key = key},
        .handle = comm, .result = newcomm});
}

/* ---- a communicator's life ---- */

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
    return value == NULL ? refuse(ncclInvalidArgument, "the place for the value is NULL")
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
