/* Orders from the environment: to fail, to hang, to be slow, to pretend a version. */
#define _GNU_SOURCE

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "emulator.h"

enum { MAX_ORDERS = 32, ANY_RANK = -1 };

struct order {
    int call;
    uint64_t at; /* the number of the call in this process, from 1 */
    enum fault fault;
    int code;
    int rank;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static struct order orders[MAX_ORDERS];
static int n_orders;
static uint64_t n_calls[N_CALLS];
static int process_rank = ANY_RANK; /* in the communicator that was made first */
static double delay_s;
static int delay_rank = ANY_RANK;

const char *const call_names[N_CALLS] = {
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
    [CALL_GET_UNIQUE_ID] = "GetUniqueId",
    [CALL_GROUP_END] = "GroupEnd",
};

/* An order that is not understood would leave a test without its fault. */
static void reject(const char *variable, const char *text)
{
    fprintf(stderr, "NCCL emulator: cannot read %s=%s (see README.md)\n", variable,
            text);
    abort();
}

static int read_call(const char **text)
{
    for (int call = OP_ALL_REDUCE; call < N_CALLS; call++) {
        const size_t length = strlen(call_names[call]);
        if (strncmp(*text, call_names[call], length) == 0 && (*text)[length] == ':') {
            *text += length + 1;
            return call;
        }
    }
    return OP_NONE;
}

static bool read_number(const char **text, long *number)
{
    char *end;
    if (!isdigit((unsigned char)**text))
        return false;
    *number = strtol(*text, &end, 10);
    *text = end;
    return true;
}

/* AllReduce:3:2@1,... or, for hangs, AllReduce:3@1,... */
static void read_orders(const char *variable, bool hangs)
{
    const char *setting = getenv(variable), *text = setting;
    while (text != NULL && *text != 0) {
        struct order order = {.fault = hangs ? FAULT_HANG : FAULT_ERROR,
                              .rank = ANY_RANK};
        long at, code = 0, rank;
        order.call = read_call(&text);
        if (order.call == OP_NONE || !read_number(&text, &at) || at < 1)
            reject(variable, setting);
        if (!hangs && (*text++ != ':' || !read_number(&text, &code)))
            reject(variable, setting);
        if (!hangs && strncmp(text, ":async", 6) == 0) {
            order.fault = FAULT_ASYNC;
            text += 6;
        }
        const bool has_communicator = order.call < OP_INIT;
        if (order.fault != FAULT_ERROR && !has_communicator)
            reject(variable, setting);
        if (*text == '@') {
            text++;
            if (!read_number(&text, &rank))
                reject(variable, setting);
            order.rank = (int)rank;
        }
        if ((*text != 0 && *text++ != ',') || n_orders == MAX_ORDERS)
            reject(variable, setting);
        order.at = (uint64_t)at;
        order.code = (int)code;
        orders[n_orders++] = order;
    }
}

static void read_delay(void)
{
    const char *setting = getenv("NCCL_EMULATOR_DELAY_US"), *text = setting;
    long microseconds, rank;
    if (setting == NULL || *setting == 0)
        return;
    if (!read_number(&text, &microseconds))
        reject("NCCL_EMULATOR_DELAY_US", setting);
    delay_s = 1e-6 * (double)microseconds;
    if (*text == '@') {
        text++;
        if (!read_number(&text, &rank))
            reject("NCCL_EMULATOR_DELAY_US", setting);
        delay_rank = (int)rank;
    }
    if (*text != 0)
        reject("NCCL_EMULATOR_DELAY_US", setting);
}

static void check_names(void)
{
    static const char prefix[] = "NCCL_EMULATOR_";
    static const char *const known[] = {"CHUNK_BYTES", "DEADLOCK_S", "DELAY_US",
                                        "FAIL",        "HANG",       "INIT_TIMEOUT_S",
                                        "LOG",         "VERSION"};
    for (char **variable = environ; *variable != NULL; variable++) {
        bool is_known = strncmp(*variable, prefix, strlen(prefix)) != 0;
        for (size_t i = 0; i < sizeof known / sizeof *known && !is_known; i++) {
            const char *name = *variable + strlen(prefix);
            const size_t length = strlen(known[i]);
            is_known = strncmp(name, known[i], length) == 0 && name[length] == '=';
        }
        if (!is_known) {
            const size_t length = strcspn(*variable, "=");
            fprintf(stderr,
                    "NCCL emulator: there is no variable %.*s (see README.md)\n",
                    (int)length, *variable);
            abort();
        }
    }
}

static void read_environment(void)
{
    check_names();
    read_orders("NCCL_EMULATOR_FAIL", false);
    read_orders("NCCL_EMULATOR_HANG", true);
    read_delay();
}

static double number_setting(const char *variable, double otherwise)
{
    const char *setting = getenv(variable);
    char *end;
    if (setting == NULL || *setting == 0)
        return otherwise;
    const double number = strtod(setting, &end);
    if (*end != 0 || !(number >= 0))
        reject(variable, setting);
    return number;
}

int pretended_version(void)
{
    /* 2.27.7 is 22707; below 2.9 it was 2708 for 2.7.8. */
    const double number = number_setting("NCCL_EMULATOR_VERSION", EMULATED_VERSION);
    if (number < 2000 || number > 99999 || number != (int)number)
        reject("NCCL_EMULATOR_VERSION", getenv("NCCL_EMULATOR_VERSION"));
    return (int)number;
}

double init_timeout_s(void)
{
    return number_setting("NCCL_EMULATOR_INIT_TIMEOUT_S", 60);
}

double deadlock_after_s(void)
{
    return number_setting("NCCL_EMULATOR_DEADLOCK_S", 1);
}

uint32_t chunk_bytes_setting(void)
{
    const double bytes = number_setting("NCCL_EMULATOR_CHUNK_BYTES", 512 * 1024);
    if (bytes < 1024 || bytes > 1 << 30 || (uint32_t)bytes % 64 != 0)
        reject("NCCL_EMULATOR_CHUNK_BYTES", getenv("NCCL_EMULATOR_CHUNK_BYTES"));
    return (uint32_t)bytes;
}

void set_process_rank(int rank)
{
    pthread_mutex_lock(&lock);
    if (process_rank == ANY_RANK)
        process_rank = rank;
    pthread_mutex_unlock(&lock);
}

enum fault next_fault(int call, ncclResult_t *code)
{
    enum fault fault = FAULT_NONE;
    pthread_once(&once, read_environment);
    pthread_mutex_lock(&lock);
    n_calls[call]++;
    for (int i = 0; i < n_orders; i++) {
        const struct order *order = &orders[i];
        if (order->call == call && order->at == n_calls[call] &&
            (order->rank == ANY_RANK || order->rank == process_rank)) {
            fault = order->fault;
            *code = (ncclResult_t)order->code;
        }
    }
    const uint64_t number = n_calls[call];
    pthread_mutex_unlock(&lock);
    if (fault == FAULT_ERROR)
        refuse(*code, "call %llu of %s fails by order of NCCL_EMULATOR_FAIL",
               (unsigned long long)number, call_names[call]);
    return fault;
}

void delay(struct communicator *comm)
{
    pthread_once(&once, read_environment);
    if (delay_s == 0 || (delay_rank != ANY_RANK && delay_rank != process_rank))
        return;
    /* In small parts, so that an abort does not have to wait. */
    const double end = now_s() + delay_s;
    for (double left = delay_s; left > 0; left = end - now_s()) {
        const double part = left < 0.005 ? left : 0.005;
        const struct timespec time = {0, (long)(part * 1e9)};
        if (comm != NULL && atomic_load(&comm->aborted))
            return;
        nanosleep(&time, NULL);
    }
}
