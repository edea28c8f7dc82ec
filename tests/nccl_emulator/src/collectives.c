/* Collectives over arrays, chunk by chunk through the memory that the ranks share.
 *
 * A chunk passes three steps on each rank, which counts the chunks that have passed:
 *   copied_in   its input is in its staging memory;
 *   reduced     it has read the staging memory of all ranks: its part of an all-reduce
 *               or reduce is among the results, that of a reduce-scatter too, and an
 *               all-gather or broadcast is in its buffer;
 *   copied_out  it has read the results.
 * Staging memory and results hold STAGES chunks, used in turn: a chunk may come in
 * when all ranks have reduced the one that was there, and be reduced when all have
 * copied out the results that were there. The counts go on from call to call. */
#include "emulator.h"

struct span { /* elements of a chunk: of the buffer, or of each block of it */
    size_t first, length;
};

static bool is_rooted_elsewhere(const struct operation_state *op)
{
    return op->call.root != op->comm->rank;
}

static struct span span_of(const struct operation_state *op, size_t chunk)
{
    const size_t first = chunk * op->chunk_elems, left = op->call.count - first;
    return (struct span){first, left < op->chunk_elems ? left : op->chunk_elems};
}

static char *staging_of(const struct communicator *comm, int rank, uint64_t chunk)
{
    const size_t stage = (size_t)rank * STAGES + chunk % STAGES;
    return comm->staging + stage * comm->chunk_bytes;
}

static char *results_of(const struct communicator *comm, uint64_t chunk)
{
    return comm->results + chunk % STAGES * comm->chunk_bytes;
}

static ncclResult_t copy_chunk_in(struct operation_state *op, size_t chunk)
{
    const struct communicator *comm = op->comm;
    const size_t bytes = type_bytes(op->call.type);
    const struct span span = span_of(op, chunk);
    char *staged = staging_of(comm, comm->rank, op->first_chunk + chunk);
    const char *send = op->sendbuf;
    if (op->call.operation == OP_BROADCAST && is_rooted_elsewhere(op))
        return ncclSuccess;
    if (op->call.operation != OP_REDUCE_SCATTER)
        return copy_in(staged, send + span.first * bytes, span.length * bytes,
                       op->stream);
    for (size_t block = 0; block < (size_t)comm->size; block++) {
        const ncclResult_t status =
            copy_in(staged + block * span.length * bytes,
                    send + (block * op->call.count + span.first) * bytes,
                    span.length * bytes, op->stream);
        if (status != ncclSuccess)
            return status;
    }
    return ncclSuccess;
}

static void reduce_part(struct operation_state *op, uint64_t chunk, size_t from,
                        size_t to)
{
    const struct communicator *comm = op->comm;
    const size_t bytes = type_bytes(op->call.type);
    const void *inputs[MAX_RANKS];
    for (int rank = 0; rank < comm->size; rank++)
        inputs[rank] = staging_of(comm, rank, chunk) + from * bytes;
    reduce(results_of(comm, chunk) + from * bytes, inputs, comm->size, to - from,
           op->call.type, op->call.redop);
}

/* Bring the staged input of one rank to its place in the receive buffer. */
static ncclResult_t take_from(struct operation_state *op, int rank, size_t chunk,
                              size_t offset)
{
    const size_t bytes = type_bytes(op->call.type);
    const struct span span = span_of(op, chunk);
    char *target = (char *)op->recvbuf + (offset + span.first) * bytes;
    const char *own = (const char *)op->sendbuf + span.first * bytes;
    if (rank == op->comm->rank && target == own)
        return ncclSuccess;
    return copy_out(target, staging_of(op->comm, rank, op->first_chunk + chunk),
                    span.length * bytes, op->stream);
}

static ncclResult_t reduce_chunk(struct operation_state *op, size_t chunk)
{
    const struct communicator *comm = op->comm;
    const size_t rank = (size_t)comm->rank, size = (size_t)comm->size;
    const size_t length = span_of(op, chunk).length;
    const uint64_t shared_chunk = op->first_chunk + chunk;
    ncclResult_t status = ncclSuccess;
    switch (op->call.operation) {
    case OP_BROADCAST: return take_from(op, op->call.root, chunk, 0);
    case OP_ALL_GATHER:
        for (int other = 0; other < comm->size && status == ncclSuccess; other++)
            status = take_from(op, other, chunk, (size_t)other * op->call.count);
        return status;
    case OP_REDUCE_SCATTER:
        reduce_part(op, shared_chunk, length * rank, length * (rank + 1));
        return status;
    default:
        reduce_part(op, shared_chunk, length * rank / size, length * (rank + 1) / size);
        return status;
    }
}

static ncclResult_t copy_chunk_out(struct operation_state *op, size_t chunk)
{
    const struct communicator *comm = op->comm;
    const size_t bytes = type_bytes(op->call.type);
    const struct span span = span_of(op, chunk);
    const char *result = results_of(comm, op->first_chunk + chunk);
    switch (op->call.operation) {
    case OP_BROADCAST:
    case OP_ALL_GATHER: return ncclSuccess;
    case OP_REDUCE:
        if (is_rooted_elsewhere(op))
            return ncclSuccess;
        break;
    case OP_REDUCE_SCATTER: result += (size_t)comm->rank * span.length * bytes; break;
    default: break;
    }
    return copy_out((char *)op->recvbuf + span.first * bytes, result,
                    span.length * bytes, op->stream);
}

/* ---- who is waited for, at each of the steps ---- */

static rank_mask holds_staging(const struct operation_state *op)
{
    rank_mask ranks = 0;
    for (int rank = 0; rank < op->comm->size; rank++)
        if (atomic_load(&op->comm->slots[rank].reduced) + STAGES <=
            op->first_chunk + op->begun)
            ranks |= (rank_mask)1 << rank;
    return ranks;
}

static rank_mask holds_reduction(const struct operation_state *op)
{
    const uint64_t chunk = op->first_chunk + op->reduced;
    rank_mask ranks = 0;
    for (int rank = 0; rank < op->comm->size; rank++) {
        struct rank_slot *slot = &op->comm->slots[rank];
        if (atomic_load(&slot->copied_in) <= chunk ||
            atomic_load(&slot->copied_out) + STAGES <= chunk)
            ranks |= (rank_mask)1 << rank;
    }
    return ranks;
}

static rank_mask holds_results(const struct operation_state *op)
{
    rank_mask ranks = 0;
    if (op->call.operation == OP_ALL_REDUCE ||
        (op->call.operation == OP_REDUCE && !is_rooted_elsewhere(op)))
        for (int rank = 0; rank < op->comm->size; rank++)
            if (atomic_load(&op->comm->slots[rank].reduced) <=
                op->first_chunk + op->finished)
                ranks |= (rank_mask)1 << rank;
    return ranks;
}

rank_mask missing_in_collective(const struct operation_state *op)
{
    rank_mask ranks = 0;
    if (!op->posted)
        return ranks;
    if (!op->checked)
        ranks |= not_posted(op);
    if (op->begun < op->n_chunks)
        ranks |= holds_staging(op);
    if (op->checked && op->reduced < op->begun)
        ranks |= holds_reduction(op);
    if (op->finished < op->reduced)
        ranks |= holds_results(op);
    return ranks & ~((rank_mask)1 << op->comm->rank);
}

static ncclResult_t count_up(struct operation_state *op, _Atomic uint64_t *shared,
                             size_t *passed, ncclResult_t status, bool *moved)
{
    if (status != ncclSuccess)
        return fail(op->comm, status, "communicator %s: rank %d cannot copy its buffer",
                    op->comm->name, op->comm->rank);
    *passed += 1;
    atomic_store(shared, op->first_chunk + *passed);
    ring(op->comm);
    *moved = true;
    return ncclSuccess;
}

static void cut_into_chunks(struct operation_state *op)
{
    size_t bytes = type_bytes(op->call.type);
    if (op->call.operation == OP_REDUCE_SCATTER)
        bytes *= (size_t)op->comm->size;
    op->chunk_elems = op->comm->chunk_bytes / bytes;
    op->n_chunks = op->call.count / op->chunk_elems;
    op->n_chunks += op->call.count % op->chunk_elems != 0;
}

ncclResult_t step_collective(struct operation_state *op, bool *moved)
{
    struct rank_slot *slot = &op->comm->slots[op->comm->rank];
    if (op->chunk_elems == 0)
        cut_into_chunks(op);
    ncclResult_t status = post_and_check(op, moved);
    if (status == ncclSuccess && op->posted && op->begun < op->n_chunks &&
        holds_staging(op) == 0)
        status = count_up(op, &slot->copied_in, &op->begun,
                          copy_chunk_in(op, op->begun), moved);
    if (status == ncclSuccess && op->checked && op->reduced < op->begun &&
        holds_reduction(op) == 0)
        status = count_up(op, &slot->reduced, &op->reduced,
                          reduce_chunk(op, op->reduced), moved);
    if (status == ncclSuccess && op->finished < op->reduced && holds_results(op) == 0)
        status = count_up(op, &slot->copied_out, &op->finished,
                          copy_chunk_out(op, op->finished), moved);
    if (status == ncclSuccess && op->checked && op->finished == op->n_chunks) {
        end_turn(op);
        *moved = true;
    }
    return status;
}
