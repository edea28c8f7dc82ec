/* What all operations have in common: their order, and that the ranks agree on it. */
#include <inttypes.h>
#include <stdio.h>

#include "emulator.h"

const char *const operation_names[N_OPERATIONS] = {
    [OP_NONE] = "none",
    [OP_ALL_REDUCE] = "AllReduce",
    [OP_REDUCE] = "Reduce",
    [OP_BROADCAST] = "Broadcast",
    [OP_REDUCE_SCATTER] = "ReduceScatter",
    [OP_ALL_GATHER] = "AllGather",
    [OP_SEND] = "Send",
    [OP_RECV] = "Recv",
    [OP_SPLIT] = "Split",
    [OP_INIT] = "Init",
};
const char *const type_names[ncclNumTypes] = {
    "int8",   "uint8",   "int32",   "uint32",  "int64",
    "uint64", "float16", "float32", "float64", "bfloat16",
};
const char *const redop_names[ncclNumOps] = {"sum", "prod", "max", "min", "avg"};

static bool reduces(int operation)
{
    return operation == OP_ALL_REDUCE || operation == OP_REDUCE ||
           operation == OP_REDUCE_SCATTER;
}

void describe_call(const struct call *call, char *text, size_t nbytes)
{
    const char *name = operation_names[call->operation];
    if (call->operation == OP_SPLIT) {
        snprintf(text, nbytes, "Split(color %d, key %d)", call->color, call->key);
        return;
    }
    if (call->operation == OP_INIT) {
        snprintf(text, nbytes, "Init");
        return;
    }
    int length = snprintf(text, nbytes, "%s(count %" PRIu64 ", %s", name, call->count,
                          type_names[call->type]);
    if (reduces(call->operation))
        length += snprintf(text + length, nbytes - (size_t)length, ", %s",
                           redop_names[call->redop]);
    if (call->operation == OP_REDUCE || call->operation == OP_BROADCAST)
        length +=
            snprintf(text + length, nbytes - (size_t)length, ", root %d", call->root);
    if (call->operation == OP_SEND || call->operation == OP_RECV)
        length += snprintf(text + length, nbytes - (size_t)length, ", %s rank %d",
                           call->operation == OP_SEND ? "to" : "from", call->root);
    snprintf(text + length, nbytes - (size_t)length, ")");
}

void describe(const struct operation_state *op, char *text, size_t nbytes)
{
    char call[128];
    describe_call(&op->call, call, sizeof call);
    const struct communicator *comm = op->comm != NULL ? op->comm : op->child;
    if (comm == NULL)
        snprintf(text, nbytes, "%s", call);
    else
        snprintf(text, nbytes,
                 "%s number %" PRIu64 " as rank %d of %d in communicator %s", call,
                 op->number, comm->rank, comm->size, comm->name);
}

/* Number an operation in the order of the calls; its turn comes in this order. */
void number_operation(struct operation_state *op)
{
    struct communicator *comm = op->comm;
    if (comm == NULL)
        return;
    pthread_mutex_lock(&comm->lock);
    if (op->call.operation == OP_SEND)
        op->number = comm->sends_numbered[op->call.root]++;
    else if (op->call.operation == OP_RECV)
        op->number = comm->recvs_numbered[op->call.root]++;
    else
        op->number = comm->collectives_numbered++;
    pthread_mutex_unlock(&comm->lock);
}

static bool is_same(const struct call *a, const struct call *b)
{
    if (a->operation == OP_SPLIT || b->operation == OP_SPLIT)
        return a->operation == b->operation;
    return a->operation == b->operation && a->count == b->count && a->type == b->type &&
           a->redop == b->redop && a->root == b->root;
}

static ncclResult_t report_mismatch(struct operation_state *op, int other)
{
    char own_text[128], other_text[128];
    struct communicator *comm = op->comm;
    describe_call(&op->call, own_text, sizeof own_text);
    describe_call(&comm->slots[other].posts[op->number % 2], other_text,
                  sizeof other_text);
    const bool is_lower = comm->rank < other;
    return fail(comm, ncclInvalidUsage,
                "mismatch: in communicator %s, collective number %" PRIu64
                " is %s on rank %d and %s on rank %d of %d",
                comm->name, op->number, is_lower ? own_text : other_text,
                is_lower ? comm->rank : other, is_lower ? other_text : own_text,
                is_lower ? other : comm->rank, comm->size);
}

/* Tell the other ranks of a collective when its turn has come, and compare it with
 * what they have told; checked: all are there. */
ncclResult_t post_and_check(struct operation_state *op, bool *moved)
{
    struct communicator *comm = op->comm;
    struct rank_slot *slot = &comm->slots[comm->rank];
    if (op->checked)
        return ncclSuccess;
    if (!op->posted) {
        if (atomic_load(&comm->turn) != op->number)
            return ncclSuccess;
        slot->posts[op->number % 2] = op->call;
        atomic_store(&slot->posted, op->number + 1);
        ring(comm);
        op->posted = *moved = true;
        op->first_chunk = comm->chunks;
    }
    for (int rank = 0; rank < comm->size; rank++)
        if (atomic_load(&comm->slots[rank].posted) > op->number &&
            !is_same(&op->call, &comm->slots[rank].posts[op->number % 2]))
            return report_mismatch(op, rank);
    if (not_posted(op) == 0)
        op->checked = *moved = true;
    return ncclSuccess;
}

rank_mask not_posted(const struct operation_state *op)
{
    rank_mask missing = 0;
    for (int rank = 0; rank < op->comm->size; rank++)
        if (atomic_load(&op->comm->slots[rank].posted) <= op->number)
            missing |= (rank_mask)1 << rank;
    return missing;
}

void end_turn(struct operation_state *op)
{
    struct communicator *comm = op->comm;
    if (op->call.operation == OP_SEND) {
        comm->chunks_sent[op->call.root] += op->n_chunks;
        atomic_store(&comm->send_turn[op->call.root], op->number + 1);
    } else if (op->call.operation == OP_RECV) {
        comm->chunks_received[op->call.root] += op->n_chunks;
        atomic_store(&comm->recv_turn[op->call.root], op->number + 1);
    } else {
        comm->chunks += op->n_chunks;
        atomic_store(&comm->turn, op->number + 1);
    }
    ring_bell(own_board(NULL));
    op->done = true;
}

static ncclResult_t step_of_kind(struct operation_state *op, bool *moved)
{
    if (op->hangs)
        return ncclSuccess;
    switch (op->call.operation) {
    case OP_SEND:
    case OP_RECV: return step_message(op, moved);
    case OP_SPLIT: return step_split(op, moved);
    case OP_INIT: return step_init(op, moved);
    default: return step_collective(op, moved);
    }
}

ncclResult_t step(struct operation_state *op, bool *moved)
{
    bool has_moved = false;
    if (op->comm != NULL && atomic_load(&op->comm->aborted))
        return failure(op->comm);
    const ncclResult_t status = step_of_kind(op, &has_moved);
    *moved = *moved || has_moved;
    /* The failure may be that of a later call, made by ranks that are ahead: as long as
     * this one can go on, it does. */
    if (status != ncclSuccess || has_moved || op->done || op->comm == NULL)
        return status;
    return failure(op->comm);
}

rank_mask missing_ranks(const struct operation_state *op)
{
    if (op->hangs || op->done)
        return 0;
    switch (op->call.operation) {
    case OP_SEND:
    case OP_RECV: return missing_in_message(op);
    case OP_SPLIT: return missing_in_split(op);
    case OP_INIT: return 0;
    default: return missing_in_collective(op);
    }
}
