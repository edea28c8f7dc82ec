/* Shared memory without names, the boards of processes, and whether one still lives. */
#define _GNU_SOURCE

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "emulator.h"

struct known_board {
    struct shared_file where;
    struct board *board;
    struct known_board *next;
};

struct open_file { /* made here, still open so that others can find it */
    struct shared_file where;
    struct open_file *next;
};

static pthread_mutex_t files_lock = PTHREAD_MUTEX_INITIALIZER;
static struct open_file *open_files;
static pthread_mutex_t boards_lock = PTHREAD_MUTEX_INITIALIZER;
static struct known_board *known_boards;
static struct board *board;
static struct shared_file board_file;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_key_t slot_key;
static _Thread_local struct thread_slot *slot;

double now_s(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

uint64_t random_bits(void)
{
    uint64_t bits = 0;
    while (bits == 0)
        if (getrandom(&bits, sizeof bits, 0) != sizeof bits)
            bits = (uint64_t)(now_s() * 1e9) ^ ((uint64_t)getpid() << 32);
    return bits;
}

/* Return when a process started, 0 when it is no more or waits for its burial. */
static uint64_t start_time(int pid)
{
    char path[64], text[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 0;
    const ssize_t length = read(fd, text, sizeof text - 1);
    close(fd);
    if (length <= 0)
        return 0;
    text[length] = 0;
    /* The second field is the name in parentheses, which may hold anything. */
    const char *field = strrchr(text, ')');
    if (field == NULL || field[1] == 0 || strchr("ZXx", field[2]) != NULL)
        return 0;
    for (int number = 3; number < 22 && field != NULL; number++)
        field = strchr(field + (number == 3 ? 2 : 1), ' ');
    return field == NULL ? 0 : strtoull(field, NULL, 10);
}

bool is_alive(const struct shared_file *process)
{
    return start_time(process->pid) == process->start_time;
}

void *create_shared(size_t nbytes, struct shared_file *where)
{
    const int fd = memfd_create("nccl_emulator", MFD_CLOEXEC);
    if (fd < 0)
        return NULL;
    void *memory = MAP_FAILED;
    if (ftruncate(fd, (off_t)nbytes) == 0)
        memory = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED) {
        close(fd);
        return NULL;
    }
    where->pid = getpid();
    where->fd = fd;
    where->start_time = start_time(where->pid);
    where->nonce = random_bits();
    struct open_file *file = malloc(sizeof *file);
    pthread_mutex_lock(&files_lock);
    *file = (struct open_file){*where, open_files};
    open_files = file;
    pthread_mutex_unlock(&files_lock);
    memcpy(memory, &where->nonce, sizeof where->nonce);
    return memory;
}

void *open_shared(const struct shared_file *where, size_t nbytes)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", where->pid, where->fd);
    const int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return NULL;
    struct stat status;
    void *memory = MAP_FAILED;
    if (fstat(fd, &status) == 0 && S_ISREG(status.st_mode) &&
        status.st_size >= (off_t)sizeof where->nonce &&
        (status.st_size >= (off_t)nbytes || ftruncate(fd, (off_t)nbytes) == 0))
        memory = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (memory == MAP_FAILED)
        return NULL;
    if (memcmp(memory, &where->nonce, sizeof where->nonce) != 0) {
        munmap(memory, nbytes);
        errno = ESTALE;
        return NULL;
    }
    return memory;
}

void close_shared(const struct shared_file *where)
{
    pthread_mutex_lock(&files_lock);
    struct open_file **place = &open_files;
    while (*place != NULL && (*place)->where.nonce != where->nonce)
        place = &(*place)->next;
    struct open_file *file = *place;
    if (file != NULL) {
        *place = file->next;
        close(file->where.fd);
        free(file);
    }
    pthread_mutex_unlock(&files_lock);
}

/* A child of fork() is another process: what it inherits belongs to its parent. */
static void forget_parent(void)
{
    pthread_mutex_init(&boards_lock, NULL);
    pthread_mutex_init(&files_lock, NULL);
    board = NULL;
    slot = NULL;
    pthread_setspecific(slot_key, NULL);
    forget_communicators();
}

static void free_slot(void *value)
{
    struct thread_slot *of_thread = value;
    atomic_fetch_add(&of_thread->epoch, 1);
    atomic_store(&of_thread->tid, 0);
}

static void prepare(void)
{
    pthread_key_create(&slot_key, free_slot);
    pthread_atfork(NULL, NULL, forget_parent);
}

struct board *own_board(struct shared_file *where)
{
    pthread_once(&once, prepare);
    pthread_mutex_lock(&boards_lock);
    if (board == NULL)
        board = create_shared(sizeof *board, &board_file);
    if (where != NULL)
        *where = board_file;
    struct board *result = board;
    pthread_mutex_unlock(&boards_lock);
    return result;
}

struct board *other_board(const struct shared_file *where)
{
    struct shared_file own;
    struct board *result = own_board(&own);
    if (where->nonce == own.nonce)
        return result;
    pthread_mutex_lock(&boards_lock);
    struct known_board *known = known_boards;
    while (known != NULL && known->where.nonce != where->nonce)
        known = known->next;
    if (known == NULL && (result = open_shared(where, sizeof *result)) != NULL) {
        known = malloc(sizeof *known);
        *known = (struct known_board){*where, result, known_boards};
        known_boards = known;
    }
    pthread_mutex_unlock(&boards_lock);
    return known == NULL ? NULL : known->board;
}

struct thread_slot *own_slot(void)
{
    if (slot != NULL)
        return slot;
    struct board *own = own_board(NULL);
    if (own == NULL)
        return NULL;
    for (int i = 0; i < MAX_THREADS; i++) {
        int32_t free_tid = 0;
        if (atomic_compare_exchange_strong(&own->threads[i].tid, &free_tid,
                                           (int32_t)syscall(SYS_gettid))) {
            slot = &own->threads[i];
            pthread_setspecific(slot_key, slot);
            return slot;
        }
    }
    atomic_store(&own->crowded, 1);
    return NULL;
}

void ring_bell(struct board *other)
{
    /* The fence pairs with that of a thread which counts itself as asleep, looks once
     * more, and only then sleeps. */
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load(&other->sleepers) > 0) {
        atomic_fetch_add(&other->doorbell, 1);
        syscall(SYS_futex, &other->doorbell, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
    }
}
