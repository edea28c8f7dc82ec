/* Threads that wait for each other in a circle.
 *
 * A thread that waits writes down, in the board of its process, for which processes it
 * waits; each thread that waits looks at the boards that it reaches over these. A
 * thread is stuck when it waits for a process all of whose calling threads are stuck.
 * The set of stuck threads is the largest one with this property; a circle in it is
 * reported by the lowest of its threads once all of them have looked at their
 * communicators again and not moved: a slow process is never taken for a stuck one. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "emulator.h"

enum { MAX_PROCESSES = 128 };

struct seen_thread {
    struct thread_slot *slot;
    uint64_t epoch, polls;
    int process;
    bool is_stuck;
    int n_missing;
    int missing[MAX_RANKS]; /* processes, -1 for one that is not known */
    char text[TEXT_BYTES];
};

struct seen_process {
    struct shared_file where;
    struct board *board;
    bool may_move; /* has a thread of which nothing is known */
};

struct view {
    int n_processes, n_threads;
    struct seen_process processes[MAX_PROCESSES];
    struct seen_thread threads[MAX_PROCESSES * 2];
};

/* What this thread has found, and since when. */
static _Thread_local struct {
    int n;
    uint64_t epochs[MAX_CYCLE], polls[MAX_CYCLE];
    struct thread_slot *slots[MAX_CYCLE];
    double since_s;
} suspicion;

/* ---- what others may know of this thread ---- */

static void add_missing(struct thread_slot *slot, const struct operation_state *op)
{
    const rank_mask missing = missing_ranks(op);
    for (int rank = 0; rank < op->comm->size; rank++)
        if ((missing >> rank & 1) != 0 && slot->n_missing < MAX_RANKS)
            slot->missing[slot->n_missing++] = op->comm->slots[rank].process;
}

static size_t add_text(char *text, size_t length, const struct operation_state *op)
{
    char description[TEXT_BYTES / 4];
    const rank_mask missing = missing_ranks(op);
    describe(op, description, sizeof description);
    length +=
        (size_t)snprintf(text + length, TEXT_BYTES - length, "%s%s waits for rank",
                         length == 0 ? "" : " and ", description);
    for (int rank = 0; rank < op->comm->size && length < TEXT_BYTES; rank++)
        if ((missing >> rank & 1) != 0)
            length += (size_t)snprintf(text + length, TEXT_BYTES - length, " %d", rank);
    return length < TEXT_BYTES ? length : TEXT_BYTES - 1;
}

void begin_waiting(struct operation_state *first, bool again)
{
    struct thread_slot *slot = own_slot();
    if (slot == NULL)
        return;
    struct shared_file missing[MAX_RANKS];
    const int n_missing = slot->n_missing;
    memcpy(missing, slot->missing, sizeof missing);
    atomic_fetch_add(&slot->version, 1);
    atomic_thread_fence(memory_order_seq_cst);
    slot->n_missing = 0;
    slot->text[0] = 0;
    size_t length = 0;
    for (struct operation_state *op = first; op != NULL; op = op->next)
        if (!op->done && op->comm != NULL && missing_ranks(op) != 0) {
            add_missing(slot, op);
            length = add_text(slot->text, length, op);
        }
    slot->waits = true;
    const bool is_same =
        again && n_missing == slot->n_missing &&
        memcmp(missing, slot->missing, (size_t)n_missing * sizeof *missing) == 0;
    atomic_fetch_add(is_same ? &slot->polls : &slot->epoch, 1);
    atomic_thread_fence(memory_order_seq_cst);
    atomic_fetch_add(&slot->version, 1);
}

void end_waiting(void)
{
    struct thread_slot *slot = own_slot();
    if (slot == NULL)
        return;
    atomic_fetch_add(&slot->version, 1);
    slot->waits = false;
    atomic_fetch_add(&slot->epoch, 1);
    atomic_fetch_add(&slot->version, 1);
    suspicion.n = 0;
}

bool is_deadlocked(char *text, size_t nbytes)
{
    struct thread_slot *slot = own_slot();
    if (slot == NULL || atomic_load(&slot->verdict) != atomic_load(&slot->epoch))
        return false;
    snprintf(text, nbytes, "%s", slot->report);
    return true;
}

/* ---- looking around ---- */

static int process_index(struct view *view, const struct shared_file *where)
{
    for (int i = 0; i < view->n_processes; i++)
        if (view->processes[i].where.nonce == where->nonce)
            return i;
    struct board *board = other_board(where);
    if (view->n_processes == MAX_PROCESSES || board == NULL)
        return -1;
    view->processes[view->n_processes] = (struct seen_process){*where, board, false};
    return view->n_processes++;
}

/* Copy what a thread has written down; false when it is writing. */
static bool read_thread(struct view *view, struct seen_thread *seen,
                        struct thread_slot *slot)
{
    struct shared_file missing[MAX_RANKS];
    const uint32_t version = atomic_load(&slot->version);
    seen->slot = slot;
    seen->epoch = atomic_load(&slot->epoch);
    seen->polls = atomic_load(&slot->polls);
    seen->is_stuck = slot->waits;
    seen->n_missing = slot->n_missing;
    memcpy(missing, slot->missing, sizeof missing);
    memcpy(seen->text, slot->text, sizeof seen->text);
    seen->text[sizeof seen->text - 1] = 0;
    atomic_thread_fence(memory_order_seq_cst);
    if (version % 2 != 0 || atomic_load(&slot->version) != version)
        return false;
    if (seen->is_stuck)
        for (int i = 0; i < seen->n_missing; i++)
            seen->missing[i] = process_index(view, &missing[i]);
    return true;
}

static void look_around(struct view *view)
{
    struct shared_file own;
    own_board(&own);
    view->n_processes = view->n_threads = 0;
    process_index(view, &own);
    for (int i = 0; i < view->n_processes; i++) {
        struct board *board = view->processes[i].board;
        view->processes[i].may_move = atomic_load(&board->crowded) != 0;
        for (int j = 0; j < MAX_THREADS; j++) {
            if (atomic_load(&board->threads[j].tid) == 0)
                continue;
            struct seen_thread *seen = &view->threads[view->n_threads];
            if (view->n_threads == MAX_PROCESSES * 2 ||
                !read_thread(view, seen, &board->threads[j])) {
                view->processes[i].may_move = true;
                continue;
            }
            seen->process = i;
            view->n_threads++;
        }
    }
}

/* Whether a thread may still be helped by a process: one that moves, or has not called
 * yet. */
static bool can_help(const struct view *view, int process)
{
    if (process < 0 || view->processes[process].may_move)
        return true;
    bool has_called = false;
    for (int i = 0; i < view->n_threads; i++) {
        if (view->threads[i].process != process)
            continue;
        if (!view->threads[i].is_stuck)
            return true;
        has_called = true;
    }
    return !has_called;
}

static void find_stuck(struct view *view)
{
    for (bool changed = true; changed;) {
        changed = false;
        for (int i = 0; i < view->n_threads; i++) {
            struct seen_thread *seen = &view->threads[i];
            bool is_stuck = false;
            for (int j = 0; j < seen->n_missing && seen->is_stuck; j++)
                is_stuck = is_stuck || !can_help(view, seen->missing[j]);
            changed = changed || is_stuck != seen->is_stuck;
            seen->is_stuck = is_stuck;
        }
    }
}

/* The thread that a stuck one waits for, of several the same for all who look. */
static int next_in_circle(const struct view *view, int thread)
{
    const struct seen_thread *seen = &view->threads[thread];
    for (int i = 0; i < seen->n_missing; i++) {
        if (can_help(view, seen->missing[i]))
            continue;
        for (int j = 0; j < view->n_threads; j++)
            if (view->threads[j].process == seen->missing[i])
                return j;
    }
    return -1;
}

static uint64_t order_of(const struct view *view, int thread)
{
    const struct seen_thread *seen = &view->threads[thread];
    const uint64_t pid = (uint64_t)view->processes[seen->process].where.pid;
    return pid << 32 | (uint32_t)atomic_load(&seen->slot->tid);
}

/* Follow the waits from this thread; return the length of the circle when this thread
 * is the lowest in it, else 0. */
static int find_circle(const struct view *view, int *circle)
{
    int own = -1, n = 0;
    for (int i = 0; i < view->n_threads; i++)
        if (view->threads[i].slot == own_slot() && view->threads[i].is_stuck)
            own = i;
    for (int i = own; i >= 0 && n < MAX_CYCLE; i = next_in_circle(view, i)) {
        if (n > 0 && (i == own || order_of(view, i) < order_of(view, own)))
            return i == own ? n : 0;
        circle[n++] = i;
    }
    return 0;
}

static void write_report(const struct view *view, const int *circle, int n,
                         char *report)
{
    size_t length = (size_t)snprintf(report, REPORT_BYTES,
                                     "deadlock: %d threads wait for each other:", n);
    for (int i = 0; i < n && length < REPORT_BYTES; i++) {
        const struct seen_thread *seen = &view->threads[circle[i]];
        length += (size_t)snprintf(
            report + length, REPORT_BYTES - length, "%s process %d: %s",
            i == 0 ? "" : ";", view->processes[seen->process].where.pid, seen->text);
    }
}

/* Whether this circle was found before, and each thread has looked again since. */
static bool is_confirmed(const struct view *view, const int *circle, int n)
{
    bool is_same = n == suspicion.n, has_looked = true;
    for (int i = 0; i < n && is_same; i++) {
        const struct seen_thread *seen = &view->threads[circle[i]];
        is_same =
            suspicion.slots[i] == seen->slot && suspicion.epochs[i] == seen->epoch;
        has_looked = has_looked && seen->polls >= suspicion.polls[i] + 2;
    }
    if (!is_same) {
        suspicion.n = n;
        suspicion.since_s = now_s();
        for (int i = 0; i < n; i++) {
            const struct seen_thread *seen = &view->threads[circle[i]];
            suspicion.slots[i] = seen->slot;
            suspicion.epochs[i] = seen->epoch;
            suspicion.polls[i] = seen->polls;
        }
    }
    return is_same && has_looked && now_s() >= suspicion.since_s + deadlock_after_s();
}

void look_for_deadlock(void)
{
    if (deadlock_after_s() <= 0 || own_slot() == NULL)
        return;
    struct view *view = malloc(sizeof *view);
    if (view == NULL)
        return;
    int circle[MAX_CYCLE];
    look_around(view);
    find_stuck(view);
    const int n = find_circle(view, circle);
    if (n == 0)
        suspicion.n = 0;
    else if (is_confirmed(view, circle, n)) {
        char report[REPORT_BYTES];
        write_report(view, circle, n, report);
        say("%s", report);
        for (int i = 0; i < n; i++) {
            struct seen_thread *seen = &view->threads[circle[i]];
            memcpy(seen->slot->report, report, sizeof report);
            atomic_store(&seen->slot->verdict, seen->epoch);
            ring_bell(view->processes[seen->process].board);
        }
    }
    free(view);
}
