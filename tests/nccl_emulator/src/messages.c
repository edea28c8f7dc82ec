/* Sends and receives: a channel from each rank to each, itself included.
 *
 * A send waits for its receive, as NCCL says: a program in which two ranks send to each
 * other outside of a group is refused here, whatever the length of its messages. */
#include <inttypes.h>

#include "emulator.h"

static bool is_send(const struct operation_state *op)
{
    return op->call.operation == OP_SEND;
}

static size_t channel_index(const struct operation_state *op)
{
    const size_t size = (size_t)op->comm->size, peer = (size_t)op->call.root;
    const size_t rank = (size_t)op->comm->rank;
    return is_send(op) ? rank * size + peer : peer * size + rank;
}

static bool is_peer_there(const struct operation_state *op)
{
    struct channel *channel = &op->comm->channels[channel_index(op)];
    return atomic_load(is_send(op) ? &channel->recvs_posted : &channel->sends_posted) >
           op->number;
}

static void post_message(struct operation_state *op)
{
    struct communicator *comm = op->comm;
    struct channel *channel = &comm->channels[channel_index(op)];
    const int peer = op->call.root;
    if (is_send(op)) {
        channel->sends[op->number % 2] = op->call;
        atomic_store(&channel->sends_posted, op->number + 1);
        op->first_chunk = comm->chunks_sent[peer];
    } else {
        channel->recvs[op->number % 2] = op->call;
        atomic_store(&channel->recvs_posted, op->number + 1);
        op->first_chunk = comm->chunks_received[peer];
    }
    const size_t bytes = type_bytes(op->call.type);
    op->chunk_elems = CHANNEL_CHUNK_BYTES / bytes;
    op->n_chunks = op->call.count / op->chunk_elems;
    op->n_chunks += op->call.count % op->chunk_elems != 0;
    op->posted = true;
    ring(comm);
}

static ncclResult_t check_message(struct operation_state *op)
{
    struct communicator *comm = op->comm;
    struct channel *channel = &comm->channels[channel_index(op)];
    const struct call *send = &channel->sends[op->number % 2];
    const struct call *recv = &channel->recvs[op->number % 2];
    op->checked = true;
    if (send->count == recv->count && send->type == recv->type)
        return ncclSuccess;
    char send_text[128], recv_text[128];
    describe_call(send, send_text, sizeof send_text);
    describe_call(recv, recv_text, sizeof recv_text);
    return fail(comm, ncclInvalidUsage,
                "mismatch: in communicator %s, message number %" PRIu64
                " of this pair is %s on rank %d and %s on rank %d of %d",
                comm->name, op->number, send_text, recv->root, recv_text, send->root,
                comm->size);
}

static ncclResult_t move_chunk(struct operation_state *op, struct channel *channel,
                               char *data)
{
    const size_t bytes = type_bytes(op->call.type);
    const size_t first = op->begun * op->chunk_elems, left = op->call.count - first;
    const size_t nbytes = (left < op->chunk_elems ? left : op->chunk_elems) * bytes;
    const ncclResult_t status =
        is_send(op)
            ? copy_in(data, (const char *)op->sendbuf + first * bytes, nbytes,
                      op->stream)
            : copy_out((char *)op->recvbuf + first * bytes, data, nbytes, op->stream);
    if (status != ncclSuccess)
        return fail(op->comm, status, "communicator %s: rank %d cannot copy its buffer",
                    op->comm->name, op->comm->rank);
    op->begun++;
    atomic_store(is_send(op) ? &channel->written : &channel->read,
                 op->first_chunk + op->begun);
    ring(op->comm);
    return ncclSuccess;
}

ncclResult_t step_message(struct operation_state *op, bool *moved)
{
    struct communicator *comm = op->comm;
    const size_t index = channel_index(op);
    struct channel *channel = &comm->channels[index];
    const int peer = op->call.root;
    if (!op->posted) {
        if (atomic_load(is_send(op) ? &comm->send_turn[peer]
                                    : &comm->recv_turn[peer]) != op->number)
            return ncclSuccess;
        post_message(op);
        *moved = true;
    }
    if (!op->checked) {
        if (!is_peer_there(op))
            return ncclSuccess;
        *moved = true;
        const ncclResult_t status = check_message(op);
        if (status != ncclSuccess)
            return status;
    }
    const uint64_t chunk = op->first_chunk + op->begun;
    const size_t stage = index * CHANNEL_STAGES + chunk % CHANNEL_STAGES;
    const bool is_ready = is_send(op)
                              ? atomic_load(&channel->read) + CHANNEL_STAGES > chunk
                              : atomic_load(&channel->written) > chunk;
    if (op->begun < op->n_chunks && is_ready) {
        const ncclResult_t status =
            move_chunk(op, channel, comm->channel_data + stage * CHANNEL_CHUNK_BYTES);
        if (status != ncclSuccess)
            return status;
        *moved = true;
    }
    if (op->begun == op->n_chunks &&
        atomic_load(&channel->read) >= op->first_chunk + op->n_chunks) {
        end_turn(op);
        *moved = true;
    }
    return ncclSuccess;
}

rank_mask missing_in_message(const struct operation_state *op)
{
    return op->posted ? (rank_mask)1 << op->call.root : 0;
}
