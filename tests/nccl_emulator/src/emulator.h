/* What the parts of the emulator share. README.md has the outline. */
#ifndef EMULATOR_H
#define EMULATOR_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "nccl_api.h"

enum {
    MAX_RANKS = 64,
    MAX_THREADS = 32,   /* of one process, that call at the same time */
    MAX_CYCLE = 32,     /* waiting threads named in one report */
    STAGES = 2,         /* chunks of a collective in flight */
    CHANNEL_STAGES = 2, /* chunks of a send in flight */
    CHANNEL_CHUNK_BYTES = 128 * 1024,
    NAME_BYTES = 64,
    TEXT_BYTES = 1024,
    REPORT_BYTES = 4096,
    CACHE_LINE = 64,
};

/* ---- processes (process.c) ---------------------------------------------------- */

/* Where to find a piece of shared memory: an open file of a living process. A file
 * that has no name leaves nothing behind, however its processes end. */
struct shared_file {
    int32_t pid;
    int32_t fd;
    uint64_t start_time; /* of the process, in clock ticks: pids are used again */
    uint64_t nonce;      /* what the file holds at its start */
};

/* A thread that waits tells for what, so that others can find cycles. */
struct thread_slot {
    _Atomic int32_t tid;      /* 0: free */
    _Atomic uint64_t epoch;   /* another number: it has moved on */
    _Atomic uint64_t polls;   /* looked again, and still waits */
    _Atomic uint32_t version; /* odd: being written */
    bool waits;
    int32_t n_missing;
    struct shared_file missing[MAX_RANKS]; /* boards of the processes it waits for */
    char text[TEXT_BYTES];                 /* what it waits for, in words */
    _Atomic uint64_t verdict;              /* the epoch that is a deadlock */
    char report[REPORT_BYTES];
};

/* One for each process, shared with all that are in a communicator with it. */
struct board {
    uint64_t nonce;
    _Atomic uint32_t doorbell; /* the word that waiting threads sleep on */
    _Atomic uint32_t sleepers;
    struct thread_slot threads[MAX_THREADS];
    _Atomic uint32_t crowded; /* a thread found no free slot */
};

struct board *own_board(struct shared_file *where);
struct board *other_board(const struct shared_file *where);
void ring_bell(struct board *board);
struct thread_slot *own_slot(void);
void *create_shared(size_t nbytes, struct shared_file *where);
void *open_shared(const struct shared_file *where, size_t nbytes);
void close_shared(const struct shared_file *where);
bool is_alive(const struct shared_file *process);
uint64_t random_bits(void);
double now_s(void);

/* ---- communicators (communicator.c) ------------------------------------------- */

enum operation {
    OP_NONE,
    OP_ALL_REDUCE,
    OP_REDUCE,
    OP_BROADCAST,
    OP_REDUCE_SCATTER,
    OP_ALL_GATHER,
    OP_SEND,
    OP_RECV,
    OP_SPLIT,
    OP_INIT,
    N_OPERATIONS,
};

/* What the ranks tell each other of a call. */
struct call {
    int32_t operation;
    int32_t type;
    int32_t redop;
    int32_t root; /* or the peer */
    uint64_t count;
    int32_t color, key;
};

struct rank_slot {
    _Alignas(CACHE_LINE) _Atomic int32_t state;
    struct shared_file process;
    struct shared_file child; /* of the last split, written by its lowest rank */
    _Atomic uint64_t children;
    struct call posts[2]; /* by parity: a rank is at most one call ahead */
    _Alignas(CACHE_LINE) _Atomic uint64_t posted;
    _Atomic uint64_t copied_in; /* chunks since the communicator was made */
    _Atomic uint64_t reduced;
    _Atomic uint64_t copied_out;
};
enum { SLOT_FREE, SLOT_TAKEN, SLOT_READY, SLOT_LEFT };

struct channel { /* from one rank to another */
    struct call sends[2], recvs[2];
    _Alignas(CACHE_LINE) _Atomic uint64_t sends_posted;
    _Atomic uint64_t written; /* chunks since the communicator was made */
    _Alignas(CACHE_LINE) _Atomic uint64_t recvs_posted;
    _Atomic uint64_t read;
};

struct segment {
    uint64_t nonce;
    _Atomic int32_t size;
    uint32_t chunk_bytes;
    char name[NAME_BYTES];
    _Atomic int32_t failure; /* 0, or FAILURE_BEING_WRITTEN, or an ncclResult_t */
    char failure_text[REPORT_BYTES];
};
enum { FAILURE_BEING_WRITTEN = -1 };

struct communicator {
    ncclComm_t handle;
    int rank, size, device;
    char name[NAME_BYTES];
    struct segment *segment;
    size_t nbytes; /* of the mapping */
    struct rank_slot *slots;
    struct channel *channels;
    char *staging, *results, *channel_data;
    size_t chunk_bytes;
    _Atomic(struct board *) boards[MAX_RANKS];

    _Atomic int async_error;
    _Atomic bool aborted;
    bool finalized;
    int users; /* threads inside a call; guarded by the table's lock */

    pthread_mutex_t lock; /* of the numbers below */
    uint64_t collectives_numbered, n_splits;
    uint64_t sends_numbered[MAX_RANKS], recvs_numbered[MAX_RANKS];
    /* The call whose turn it is: two threads may call at the same time. */
    _Atomic uint64_t turn;
    _Atomic uint64_t send_turn[MAX_RANKS], recv_turn[MAX_RANKS];
    uint64_t chunks; /* of finished collectives */
    uint64_t chunks_sent[MAX_RANKS], chunks_received[MAX_RANKS];
};

struct communicator *acquire(ncclComm_t handle);
void release(struct communicator *comm);
/* Take a rank's place in a communicator; the others may still be missing. */
ncclResult_t attach(struct communicator **result, const struct shared_file *where,
                    int size, int rank);
bool all_attached(struct communicator *comm);
ncclResult_t no_communicator(const char *call);
ncclResult_t check_config(const ncclConfig_t *config);
ncclComm_t publish(struct communicator *comm);
void discard(struct communicator *comm);
ncclResult_t retire(ncclComm_t handle, bool abort);
void forget_communicators(void);
ncclResult_t create_segment(struct shared_file *where, const char *name);
void ring(struct communicator *comm);
/* Make all calls on a communicator fail, on all its ranks; return the code of the first
 * failure. fail() also prints the text, when it is the first. */
ncclResult_t mark_failed(struct communicator *comm, ncclResult_t code, const char *text,
                         bool *is_first);
ncclResult_t fail(struct communicator *comm, ncclResult_t code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
ncclResult_t failure(struct communicator *comm);

/* ---- operations (operation.c and others) ---------------------------------------- */

/* One call on its way. step() does what can be done without waiting. */
struct operation_state {
    struct call call;
    ncclComm_t handle;
    struct communicator *comm; /* held from the start to the end of the call */
    const void *sendbuf;
    void *recvbuf;
    cudaStream_t stream;
    uint64_t number; /* among the collectives, or the sends or recvs of this pair */
    bool grouped, is_to_self, posted, checked, hangs, done;
    size_t chunk_elems, n_chunks, begun, reduced, finished;
    uint64_t first_chunk;
    /* of a split or an initialisation */
    struct communicator *child;
    struct shared_file child_file;
    ncclComm_t *result;
    int child_rank, child_size;
    uint8_t members[MAX_RANKS]; /* of the child: their ranks in the parent */
    double deadline_s;
    struct operation_state *next;
};

typedef uint64_t rank_mask; /* bit r: rank r */

/* Advance an operation; *moved is set when anything was done. */
ncclResult_t step(struct operation_state *op, bool *moved);
ncclResult_t step_collective(struct operation_state *op, bool *moved);
ncclResult_t step_message(struct operation_state *op, bool *moved);
ncclResult_t step_split(struct operation_state *op, bool *moved);
ncclResult_t step_init(struct operation_state *op, bool *moved);
/* The ranks without which the operation cannot go on. */
rank_mask missing_ranks(const struct operation_state *op);
rank_mask missing_in_collective(const struct operation_state *op);
rank_mask missing_in_message(const struct operation_state *op);
rank_mask missing_in_split(const struct operation_state *op);

ncclResult_t post_and_check(struct operation_state *op, bool *moved);
rank_mask not_posted(const struct operation_state *op);
void end_turn(struct operation_state *op);
void number_operation(struct operation_state *op);

/* Step the operations of a list until all are done or one has failed. */
ncclResult_t run_operations(struct operation_state *first);
/* Take a call on: run it now, or at the end of the group. */
ncclResult_t submit(const struct operation_state *op);
ncclResult_t note(ncclResult_t status);
bool is_in_group(void);

void describe_call(const struct call *call, char *text, size_t nbytes);
void describe(const struct operation_state *op, char *text, size_t nbytes);
extern const char *const operation_names[N_OPERATIONS];
extern const char *const type_names[ncclNumTypes];
extern const char *const redop_names[ncclNumOps];

/* ---- deadlocks (deadlock.c) ----------------------------------------------------- */

void begin_waiting(struct operation_state *first, bool again);
void end_waiting(void);
/* Whether this thread's wait was found to be a deadlock; text: the report. */
bool is_deadlocked(char *text, size_t nbytes);
void look_for_deadlock(void);

/* ---- arithmetic (reduction.c) --------------------------------------------------- */

size_t type_bytes(int type);
/* out[i] = in[0][i] op ... op in[n-1][i], in this order; float16 and bfloat16 in
 * float32, rounded once. */
void reduce(void *out, const void *const *in, int n, size_t count, int type, int op);

/* ---- memory (memory_host.c, memory_cuda.c) -------------------------------------- */

/* Copy between a caller's buffer and staging memory, in the order of the stream; done
 * when it returns. */
ncclResult_t copy_in(void *staged, const void *user, size_t nbytes,
                     cudaStream_t stream);
ncclResult_t copy_out(void *user, const void *staged, size_t nbytes,
                      cudaStream_t stream);
extern const char *const memory_kind;
int current_device(int rank);

/* ---- orders from the environment, log (faults.c, log.c) -------------------------- */

enum fault { FAULT_NONE, FAULT_ERROR, FAULT_ASYNC, FAULT_HANG };
enum { CALL_GET_UNIQUE_ID = N_OPERATIONS, CALL_GROUP_END, N_CALLS };
extern const char *const call_names[N_CALLS];

void set_process_rank(int rank);
enum fault next_fault(int call, ncclResult_t *code);
void delay(struct communicator *comm);
double init_timeout_s(void);
double deadlock_after_s(void);
int pretended_version(void);
uint32_t chunk_bytes_setting(void);
void log_operation(const struct operation_state *op);
void log_call(const char *format, ...) __attribute__((format(printf, 1, 2)));
void say(const char *format, ...) __attribute__((format(printf, 1, 2)));
ncclResult_t refuse(ncclResult_t code, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
void remember_error(const char *text);
const char *last_error(void);

#endif
