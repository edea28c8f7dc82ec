/* Making communicators: from a unique id, and out of another communicator. */
#include <inttypes.h>
#include <stdio.h>

#include "emulator.h"

static ncclResult_t report_timeout(struct communicator *child)
{
    char missing[4 * MAX_RANKS] = "";
    size_t length = 0;
    for (int rank = 0; rank < child->size; rank++)
        if (atomic_load(&child->slots[rank].state) < SLOT_READY)
            length += (size_t)snprintf(missing + length, sizeof missing - length, " %d",
                                       rank);
    return fail(child, ncclSystemError,
                "communicator %s: of its %d ranks these have not joined within %g s:%s",
                child->name, child->size, init_timeout_s(), missing);
}

/* Wait until all ranks of the new communicator are there, then give out its handle. */
static ncclResult_t wait_for_all(struct operation_state *op, bool *moved)
{
    struct communicator *child = op->child;
    const ncclResult_t status = failure(child);
    if (status != ncclSuccess)
        return status;
    if (all_attached(child)) {
        ring(child);
        close_shared(&op->child_file);
        op->child_file.fd = -1;
        *op->result = publish(child);
        op->child = NULL;
        *moved = true;
        if (op->comm != NULL)
            end_turn(op);
        else
            op->done = true;
        return ncclSuccess;
    }
    if (now_s() > op->deadline_s)
        return report_timeout(child);
    return ncclSuccess;
}

ncclResult_t step_init(struct operation_state *op, bool *moved)
{
    if (op->child == NULL) {
        const ncclResult_t status =
            attach(&op->child, &op->child_file, op->child_size, op->child_rank);
        if (status != ncclSuccess)
            return status;
        op->deadline_s = now_s() + init_timeout_s();
        *moved = true;
    }
    return wait_for_all(op, moved);
}

/* Fill in the members of this rank's part, in the order of their keys. */
static void find_members(struct operation_state *op)
{
    struct communicator *comm = op->comm;
    for (int rank = 0; rank < comm->size; rank++) {
        const struct call *call = &comm->slots[rank].posts[op->number % 2];
        if (call->color != op->call.color)
            continue;
        int place = op->child_size++;
        while (place > 0 &&
               comm->slots[op->members[place - 1]].posts[op->number % 2].key >
                   call->key) {
            op->members[place] = op->members[place - 1];
            place--;
        }
        op->members[place] = (uint8_t)rank;
    }
    for (int place = 0; place < op->child_size; place++)
        if (op->members[place] == comm->rank)
            op->child_rank = place;
}

static ncclResult_t lead(struct operation_state *op, uint64_t n_splits_before)
{
    struct communicator *comm = op->comm;
    struct rank_slot *slot = &comm->slots[comm->rank];
    char name[NAME_BYTES + 32];
    snprintf(name, sizeof name, "%s.%" PRIu64 ".%d", comm->name, n_splits_before,
             op->call.color);
    const ncclResult_t status = create_segment(&op->child_file, name);
    if (status != ncclSuccess)
        return status;
    slot->child = op->child_file;
    atomic_store(&slot->children, op->number + 1);
    ring(comm);
    return ncclSuccess;
}

ncclResult_t step_split(struct operation_state *op, bool *moved)
{
    struct communicator *comm = op->comm;
    if (op->child != NULL)
        return wait_for_all(op, moved);
    ncclResult_t status = post_and_check(op, moved);
    if (status != ncclSuccess || !op->checked)
        return status;
    if (op->child_size == 0) {
        *moved = true;
        const uint64_t n_splits_before = comm->n_splits++;
        if (op->call.color == NCCL_SPLIT_NOCOLOR) {
            end_turn(op);
            return ncclSuccess;
        }
        find_members(op);
        if (op->child_rank == 0)
            status = lead(op, n_splits_before);
        if (status != ncclSuccess)
            return fail(comm, status, "communicator %s: rank %d cannot split",
                        comm->name, comm->rank);
    }
    struct rank_slot *leader = &comm->slots[op->members[0]];
    if (atomic_load(&leader->children) <= op->number)
        return ncclSuccess;
    struct shared_file file = leader->child;
    status = attach(&op->child, &file, op->child_size, op->child_rank);
    if (status != ncclSuccess)
        return fail(comm, status, "communicator %s: rank %d cannot join its part",
                    comm->name, comm->rank);
    op->deadline_s = now_s() + init_timeout_s();
    *moved = true;
    return ncclSuccess;
}

rank_mask missing_in_split(const struct operation_state *op)
{
    rank_mask ranks = 0;
    if (!op->posted)
        return 0;
    if (!op->checked)
        ranks = not_posted(op);
    else if (op->child == NULL && op->child_size > 0)
        ranks = (rank_mask)1 << op->members[0];
    else if (op->child != NULL)
        for (int place = 0; place < op->child_size; place++)
            if (atomic_load(&op->child->slots[place].state) < SLOT_READY)
                ranks |= (rank_mask)1 << op->members[place];
    return ranks & ~((rank_mask)1 << op->comm->rank);
}
