/* NCCL's operations: what comes before each of them, and their arguments. */
#include <inttypes.h>

#include "emulator.h"

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
        status =
            refuse(ncclInvalidUsage, "nccl%s: the communicator was finalized", name);
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
    return refuse(
        ncclInvalidUsage,
        "nccl%s: the buffers overlap, but not as an operation in place has it",
        operation_names[call->operation]);
}

/* reads, writes: whether this rank's send and receive buffers are used. */
static ncclResult_t check_call(const struct operation_state *op, bool reads,
                               bool writes)
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

/* Arguments that an operation does not have are 0. */
static ncclResult_t run(enum operation operation, const void *sendbuf, void *recvbuf,
                        size_t count, int type, int redop, int root, ncclComm_t comm,
                        cudaStream_t stream)
{
    struct operation_state op = {
        .handle = comm, .sendbuf = sendbuf, .recvbuf = recvbuf, .stream = stream};
    op.call.operation = operation;
    op.call.count = count;
    op.call.type = type;
    op.call.redop = redop;
    op.call.root = root;
    return call(&op);
}

ncclResult_t ncclAllReduce(const void *sendbuf, void *recvbuf, size_t count,
                           ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                           cudaStream_t stream)
{
    return run(OP_ALL_REDUCE, sendbuf, recvbuf, count, type, op, 0, comm, stream);
}

ncclResult_t ncclReduce(const void *sendbuf, void *recvbuf, size_t count,
                        ncclDataType_t type, ncclRedOp_t op, int root, ncclComm_t comm,
                        cudaStream_t stream)
{
    return run(OP_REDUCE, sendbuf, recvbuf, count, type, op, root, comm, stream);
}

ncclResult_t ncclBroadcast(const void *sendbuf, void *recvbuf, size_t count,
                           ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream)
{
    return run(OP_BROADCAST, sendbuf, recvbuf, count, type, 0, root, comm, stream);
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
    return run(OP_REDUCE_SCATTER, sendbuf, recvbuf, recvcount, type, op, 0, comm,
               stream);
}

ncclResult_t ncclAllGather(const void *sendbuf, void *recvbuf, size_t sendcount,
                           ncclDataType_t type, ncclComm_t comm, cudaStream_t stream)
{
    return run(OP_ALL_GATHER, sendbuf, recvbuf, sendcount, type, 0, 0, comm, stream);
}

ncclResult_t ncclSend(const void *sendbuf, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream)
{
    return run(OP_SEND, sendbuf, NULL, count, type, 0, peer, comm, stream);
}

ncclResult_t ncclRecv(void *recvbuf, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream)
{
    return run(OP_RECV, NULL, recvbuf, count, type, 0, peer, comm, stream);
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
    struct operation_state op = {.handle = comm, .result = newcomm};
    op.call.operation = OP_SPLIT;
    op.call.color = color;
    op.call.key = key;
    return call(&op);
}
