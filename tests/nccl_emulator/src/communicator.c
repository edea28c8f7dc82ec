/* Communicators: the memory that their ranks share, and the handles of this process. */
#define _GNU_SOURCE

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "emulator.h"

/* ---- handles ---- */

struct entry {
    struct communicator *comm;
    struct entry *next;
};

static pthread_mutex_t table_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t user_left = PTHREAD_COND_INITIALIZER;
static struct entry *table;
/* Handles are numbers that are never given out again: that of a destroyed
 * communicator is recognised, where an address might have become another's. */
static uintptr_t last_handle = 0x10000;

static struct entry **find(ncclComm_t handle)
{
    struct entry **place = &table;
    while (*place != NULL && (*place)->comm->handle != handle)
        place = &(*place)->next;
    return place;
}

struct communicator *acquire(ncclComm_t handle)
{
    pthread_mutex_lock(&table_lock);
    struct entry *entry = *find(handle);
    struct communicator *comm = entry == NULL ? NULL : entry->comm;
    if (comm != NULL)
        comm->users++;
    pthread_mutex_unlock(&table_lock);
    return comm;
}

void release(struct communicator *comm)
{
    pthread_mutex_lock(&table_lock);
    if (--comm->users == 0)
        pthread_cond_broadcast(&user_left);
    pthread_mutex_unlock(&table_lock);
}

ncclComm_t publish(struct communicator *comm)
{
    struct entry *entry = malloc(sizeof *entry);
    pthread_mutex_lock(&table_lock);
    last_handle += 0x40;
    comm->handle = (ncclComm_t)last_handle;
    *entry = (struct entry){comm, table};
    table = entry;
    pthread_mutex_unlock(&table_lock);
    return comm->handle;
}

ncclResult_t retire(ncclComm_t handle, bool abort)
{
    pthread_mutex_lock(&table_lock);
    struct entry **place = find(handle), *entry = *place;
    if (entry == NULL) {
        pthread_mutex_unlock(&table_lock);
        return ncclInvalidArgument;
    }
    struct communicator *comm = entry->comm;
    *place = entry->next;
    free(entry);
    pthread_mutex_unlock(&table_lock);

    if (abort) {
        atomic_store(&comm->aborted, true);
        atomic_store(&comm->slots[comm->rank].state, SLOT_LEFT);
        ring(comm);
    }
    pthread_mutex_lock(&table_lock);
    while (comm->users > 0)
        pthread_cond_wait(&user_left, &table_lock);
    pthread_mutex_unlock(&table_lock);
    discard(comm);
    return ncclSuccess;
}

void forget_communicators(void)
{
    pthread_mutex_init(&table_lock, NULL);
    table = NULL;
}

/* ---- shared memory ---- */

static size_t rounded(size_t nbytes)
{
    return (nbytes + 4095) / 4096 * 4096;
}

/* Lay the parts out one after the other; return the bytes of all. */
static size_t lay_out(struct communicator *comm, char *base)
{
    const size_t n = (size_t)comm->size;
    size_t offset = rounded(sizeof(struct segment));
    comm->segment = (struct segment *)base;
    comm->slots = (struct rank_slot *)(base + offset);
    offset += rounded(n * sizeof *comm->slots);
    comm->channels = (struct channel *)(base + offset);
    offset += rounded(n * n * sizeof *comm->channels);
    comm->staging = base + offset;
    offset += n * STAGES * comm->chunk_bytes;
    comm->results = base + offset;
    offset += STAGES * comm->chunk_bytes;
    comm->channel_data = base + offset;
    return offset + n * n * CHANNEL_STAGES * CHANNEL_CHUNK_BYTES;
}

ncclResult_t create_segment(struct shared_file *where, const char *name)
{
    struct segment *segment = create_shared(rounded(sizeof *segment), where);
    if (segment == NULL)
        return refuse(ncclSystemError, "no shared memory: %s", strerror(errno));
    segment->chunk_bytes = chunk_bytes_setting();
    if (name == NULL)
        snprintf(segment->name, sizeof segment->name, "%08x", (uint32_t)where->nonce);
    else
        snprintf(segment->name, sizeof segment->name, "%s", name);
    munmap(segment, rounded(sizeof *segment));
    return ncclSuccess;
}

static ncclResult_t take_place(struct communicator *comm)
{
    struct rank_slot *slot = &comm->slots[comm->rank];
    int32_t state = SLOT_FREE;
    if (!atomic_compare_exchange_strong(&slot->state, &state, SLOT_TAKEN))
        return fail(comm, ncclInvalidUsage,
                    "two callers want to be rank %d of %d in communicator %s",
                    comm->rank, comm->size, comm->name);
    if (own_board(&slot->process) == NULL)
        return fail(comm, ncclSystemError, "no shared memory: %s", strerror(errno));
    atomic_store(&slot->state, SLOT_READY);
    ring(comm);
    return ncclSuccess;
}

ncclResult_t attach(struct communicator **result, const struct shared_file *where,
                    int size, int rank)
{
    struct segment *head = open_shared(where, rounded(sizeof *head));
    if (head == NULL)
        return refuse(ncclSystemError,
                      "the unique id is not, or no longer, valid: process %d, which "
                      "made it, %s (%s)",
                      where->pid,
                      is_alive(where) ? "does not offer its memory" : "is not there",
                      strerror(errno));
    int32_t others = 0;
    atomic_compare_exchange_strong(&head->size, &others, size);
    struct communicator *comm = calloc(1, sizeof *comm);
    /* Of another size than its own, a rank can still tell the others. */
    comm->size = others == 0 ? size : others;
    comm->rank = rank;
    comm->chunk_bytes = head->chunk_bytes;
    memcpy(comm->name, head->name, sizeof comm->name);
    munmap(head, rounded(sizeof *head));

    comm->nbytes = lay_out(comm, NULL);
    char *memory = open_shared(where, comm->nbytes);
    if (memory == NULL) {
        free(comm);
        return refuse(ncclSystemError, "no shared memory: %s", strerror(errno));
    }
    lay_out(comm, memory);
    pthread_mutex_init(&comm->lock, NULL);
    comm->device = current_device(rank);
    ncclResult_t status;
    if (comm->size != size)
        status = fail(comm, ncclInvalidArgument,
                      "communicator %s: rank %d was given %d ranks, others %d",
                      comm->name, rank, size, comm->size);
    else
        status = take_place(comm);
    if (status != ncclSuccess) {
        comm->rank = -1; /* no place to leave */
        discard(comm);
        return status;
    }
    *result = comm;
    return ncclSuccess;
}

bool all_attached(struct communicator *comm)
{
    for (int rank = 0; rank < comm->size; rank++)
        if (atomic_load(&comm->slots[rank].state) < SLOT_READY)
            return false;
    return true;
}

void discard(struct communicator *comm)
{
    if (comm->rank >= 0) {
        atomic_store(&comm->slots[comm->rank].state, SLOT_LEFT);
        ring(comm);
    }
    munmap(comm->segment, comm->nbytes);
    pthread_mutex_destroy(&comm->lock);
    free(comm);
}

void ring(struct communicator *comm)
{
    for (int rank = 0; rank < comm->size; rank++) {
        struct board *board = atomic_load(&comm->boards[rank]);
        if (board == NULL && atomic_load(&comm->slots[rank].state) >= SLOT_READY) {
            board = other_board(&comm->slots[rank].process);
            atomic_store(&comm->boards[rank], board);
        }
        if (board != NULL)
            ring_bell(board);
    }
}

/* ---- failures ---- */

ncclResult_t mark_failed(struct communicator *comm, ncclResult_t code, const char *text,
                         bool *is_first)
{
    int32_t none = 0;
    *is_first = atomic_compare_exchange_strong(&comm->segment->failure, &none,
                                               FAILURE_BEING_WRITTEN);
    if (*is_first) {
        snprintf(comm->segment->failure_text, REPORT_BYTES, "%s", text);
        atomic_store(&comm->segment->failure, (int32_t)code);
        ring(comm);
    } else if (none > 0) {
        code = (ncclResult_t)none;
        text = comm->segment->failure_text;
    }
    remember_error(text);
    return code;
}

ncclResult_t fail(struct communicator *comm, ncclResult_t code, const char *format, ...)
{
    char text[REPORT_BYTES];
    bool is_first;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    code = mark_failed(comm, code, text, &is_first);
    if (is_first)
        say("%s", text);
    return code;
}

ncclResult_t failure(struct communicator *comm)
{
    if (atomic_load(&comm->aborted)) {
        char text[TEXT_BYTES];
        snprintf(text, sizeof text, "communicator %s was aborted", comm->name);
        remember_error(text);
        return ncclInternalError;
    }
    const int32_t code = atomic_load(&comm->segment->failure);
    if (code > 0) {
        remember_error(comm->segment->failure_text);
        return (ncclResult_t)code;
    }
    return (ncclResult_t)atomic_load(&comm->async_error);
}
