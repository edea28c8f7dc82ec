/* Calls that start at once, and calls that start at the end of a group. */
#include <stdlib.h>

#include "emulator.h"

static _Thread_local struct {
    int depth;
    ncclResult_t error; /* the first one inside the group */
    struct operation_state *first, **end;
} group;

static void drop(struct operation_state *first)
{
    while (first != NULL) {
        struct operation_state *next = first->next;
        if (first->comm != NULL)
            release(first->comm);
        free(first);
        first = next;
    }
}

/* Hold the communicators, number and log the calls, and run them. */
static ncclResult_t start(struct operation_state *first)
{
    ncclResult_t status = ncclSuccess;
    for (struct operation_state *op = first; op != NULL; op = op->next)
        if (op->handle != NULL && (op->comm = acquire(op->handle)) == NULL)
            status =
                refuse(ncclInvalidArgument,
                       "a communicator of this group was destroyed before its end");
    for (struct operation_state *op = first; op != NULL && status == ncclSuccess;
         op = op->next) {
        number_operation(op);
        log_operation(op);
    }
    if (status == ncclSuccess)
        status = run_operations(first);
    drop(first);
    return status;
}

/* Copy an operation; run it now, or at the end of the group. */
ncclResult_t submit(const struct operation_state *op)
{
    struct operation_state *copy = malloc(sizeof *copy);
    if (copy == NULL)
        return refuse(ncclSystemError, "no memory");
    *copy = *op;
    copy->comm = NULL;
    copy->grouped = group.depth > 0;
    if (!copy->grouped)
        return start(copy);
    *group.end = copy;
    group.end = &copy->next;
    return ncclSuccess;
}

bool is_in_group(void)
{
    return group.depth > 0;
}

/* An error of a call inside a group is the group's too. */
ncclResult_t note(ncclResult_t status)
{
    if (group.depth > 0 && group.error == ncclSuccess)
        group.error = status;
    return status;
}

ncclResult_t ncclGroupStart(void)
{
    if (group.depth++ == 0) {
        group.first = NULL;
        group.end = &group.first;
        group.error = ncclSuccess;
    }
    return ncclSuccess;
}

/* Refuse messages to oneself without their other half: they would never end. */
static ncclResult_t check_own_messages(const struct operation_state *first)
{
    for (const struct operation_state *op = first; op != NULL; op = op->next) {
        int difference = 0;
        if (op->call.operation != OP_SEND && op->call.operation != OP_RECV)
            continue;
        if (!op->is_to_self)
            continue;
        for (const struct operation_state *other = first; other != NULL;
             other = other->next)
            if (other->handle == op->handle && other->is_to_self)
                difference += other->call.operation == OP_SEND ? 1 : -1;
        if (difference != 0)
            return refuse(
                ncclInvalidUsage,
                "a rank sends to itself: as many ncclSend as ncclRecv have to "
                "stand in the same group");
    }
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd(void)
{
    if (group.depth == 0)
        return refuse(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
    if (--group.depth > 0)
        return ncclSuccess;
    struct operation_state *first = group.first;
    group.first = NULL;
    ncclResult_t code = ncclSuccess;
    if (next_fault(CALL_GROUP_END, &code) == FAULT_ERROR) {
        drop(first);
        return code;
    }
    if (group.error == ncclSuccess)
        group.error = check_own_messages(first);
    if (group.error != ncclSuccess) {
        drop(first);
        return group.error;
    }
    return first == NULL ? ncclSuccess : start(first);
}
