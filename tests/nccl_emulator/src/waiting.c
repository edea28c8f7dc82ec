/* Running operations to their end: one alone, or all of a group together. */
#define _GNU_SOURCE

#include <linux/futex.h>
#include <sched.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "emulator.h"

/* Looking again costs less than sleeping when the others are running, and more when
 * they need this processor: so a little of it, then the processor is left to them. */
enum { N_LOOKS = 100, N_YIELDS = 20, SLEEP_MS = 20 };
static const double CHECK_EVERY_S = 0.1;

/* ---- waiting ---- */

struct wait {
    int n_looks;
    double next_check_s; /* 0: has not slept yet */
    bool is_published;
};

static ncclResult_t step_all(struct operation_state *first, bool *moved, bool *done,
                             struct operation_state **failed)
{
    *moved = false;
    *done = true;
    for (struct operation_state *op = first; op != NULL; op = op->next) {
        if (op->done)
            continue;
        const ncclResult_t status = step(op, moved);
        if (status != ncclSuccess) {
            *failed = op;
            return status;
        }
        *done = *done && op->done;
    }
    return ncclSuccess;
}

/* Fail a communicator whose missing rank has left or died. A rank may have done its
 * part before that: so the operation is tried once more in between. */
static ncclResult_t check_peers(struct operation_state *op)
{
    struct communicator *comm = op->comm != NULL ? op->comm : op->child;
    const bool joins = op->child != NULL;
    if (comm == NULL || op->hangs)
        return ncclSuccess;
    struct communicator *peers = joins ? op->child : comm;
    for (int rank = 0; rank < peers->size; rank++) {
        const rank_mask bit = (rank_mask)1 << rank;
        struct rank_slot *slot = &peers->slots[rank];
        const int state = atomic_load(&slot->state);
        if (rank == peers->rank || state < SLOT_READY ||
            (!joins && (missing_ranks(op) & bit) == 0))
            continue;
        const bool is_dead = state == SLOT_READY && !is_alive(&slot->process);
        if (state != SLOT_LEFT && !is_dead)
            continue;
        bool moved = false;
        const ncclResult_t status = step(op, &moved);
        if (status != ncclSuccess || op->done)
            return status;
        if (joins ? all_attached(peers) : (missing_ranks(op) & bit) == 0)
            continue;
        char text[TEXT_BYTES];
        describe(op, text, sizeof text);
        return fail(
            peers, ncclRemoteError,
            "rank %d of %d in communicator %s (process %d) %s: %s waited for it", rank,
            peers->size, peers->name, slot->process.pid,
            is_dead ? "has died" : "has left", text);
    }
    return ncclSuccess;
}

/* Sleep until another process or thread has done something, or a short time. */
static ncclResult_t sleep_a_little(struct operation_state *first, bool *moved,
                                   bool *done, struct operation_state **failed)
{
    struct board *own = own_board(NULL);
    const uint32_t bell = atomic_load(&own->doorbell);
    atomic_fetch_add(&own->sleepers, 1);
    atomic_thread_fence(memory_order_seq_cst);
    const ncclResult_t status = step_all(first, moved, done, failed);
    if (status == ncclSuccess && !*moved && !*done) {
        const struct timespec limit = {0, SLEEP_MS * 1000000L};
        syscall(SYS_futex, &own->doorbell, FUTEX_WAIT, bell, &limit, NULL, 0);
    }
    atomic_fetch_sub(&own->sleepers, 1);
    return status;
}

static ncclResult_t check_now(struct operation_state *first,
                              struct operation_state **failed)
{
    for (struct operation_state *op = first; op != NULL; op = op->next) {
        const ncclResult_t status = op->done ? ncclSuccess : check_peers(op);
        if (status != ncclSuccess) {
            *failed = op;
            return status;
        }
    }
    return ncclSuccess;
}

static ncclResult_t wait_once(struct operation_state *first, struct wait *wait,
                              bool *moved, bool *done, struct operation_state **failed)
{
    if (wait->n_looks++ < N_LOOKS)
        return ncclSuccess;
    if (wait->n_looks < N_LOOKS + N_YIELDS) {
        sched_yield();
        return ncclSuccess;
    }
    ncclResult_t status = sleep_a_little(first, moved, done, failed);
    if (status != ncclSuccess || *moved || *done)
        return status;
    const double now = now_s();
    if (wait->next_check_s == 0)
        wait->next_check_s = now + CHECK_EVERY_S;
    if (now < wait->next_check_s)
        return ncclSuccess;
    wait->next_check_s = now + CHECK_EVERY_S;
    status = check_now(first, failed);
    if (status == ncclSuccess)
        begin_waiting(first, wait->is_published);
    wait->is_published = true;
    look_for_deadlock();
    char report[REPORT_BYTES];
    bool is_first;
    if (status == ncclSuccess && is_deadlocked(report, sizeof report)) {
        for (struct operation_state *op = first; op != NULL; op = op->next)
            if (!op->done && missing_ranks(op) != 0) {
                *failed = op;
                status = mark_failed(op->comm, ncclInvalidUsage, report, &is_first);
            }
    }
    return status;
}

/* ---- running ---- */

/* Give up what a failure has left unfinished; the other ranks are told. */
static void abandon(struct operation_state *first, const struct operation_state *failed,
                    ncclResult_t status, const char *error)
{
    char text[TEXT_BYTES];
    bool is_first;
    describe(failed, text, sizeof text);
    /* The calls that would come after it on this rank have lost their turn. */
    if (failed->comm != NULL && !atomic_load(&failed->comm->aborted))
        mark_failed(failed->comm, status, error, &is_first);
    for (struct operation_state *op = first; op != NULL; op = op->next) {
        if (op->done)
            continue;
        if (op->child != NULL) {
            discard(op->child);
            op->child = NULL;
        }
        close_shared(&op->child_file);
        if (op == failed || op->comm == NULL || op->comm == failed->comm)
            continue;
        if (!atomic_load(&op->comm->aborted))
            fail(op->comm, ncclRemoteError,
                 "communicator %s: rank %d gave up its group after an error in %s",
                 op->comm->name, op->comm->rank, text);
    }
}

ncclResult_t run_operations(struct operation_state *first)
{
    struct wait wait = {0};
    struct operation_state *failed = NULL;
    ncclResult_t status;
    bool moved, done;
    if (first->comm != NULL)
        own_slot(); /* from now on others count with this thread's calls */
    for (;;) {
        status = step_all(first, &moved, &done, &failed);
        if (status == ncclSuccess && !moved && !done)
            status = wait_once(first, &wait, &moved, &done, &failed);
        if (status != ncclSuccess || done)
            break;
        if (moved) {
            if (wait.is_published)
                end_waiting();
            wait = (struct wait){0};
        }
    }
    if (wait.is_published)
        end_waiting();
    if (status != ncclSuccess) {
        char error[REPORT_BYTES];
        snprintf(error, sizeof error, "%s", last_error());
        abandon(first, failed, status, error);
        remember_error(error);
    }
    return status;
}
