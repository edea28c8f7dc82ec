/* What the emulator tells: the log of calls, reports on stderr, the last error. */
#define _GNU_SOURCE

#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "emulator.h"

static _Thread_local char last[REPORT_BYTES];

void remember_error(const char *text)
{
    if (text != last)
        snprintf(last, sizeof last, "%s", text);
}

const char *last_error(void)
{
    return last;
}

/* One write a line: the lines of several processes do not mix. */
static void write_line(int fd, const char *start, const char *text)
{
    char line[REPORT_BYTES + 64];
    const int length = snprintf(line, sizeof line, "%s%s\n", start, text);
    const size_t nbytes = length < (int)sizeof line ? (size_t)length : sizeof line - 1;
    if (write(fd, line, nbytes) < 0)
        return; /* nobody is left to tell */
}

void say(const char *format, ...)
{
    char text[REPORT_BYTES];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    write_line(STDERR_FILENO, "NCCL emulator: ", text);
}

/* Return an error of this process alone; NCCL_DEBUG shows the text, as with NCCL. */
ncclResult_t refuse(ncclResult_t code, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(last, sizeof last, format, arguments);
    va_end(arguments);
    const char *level = getenv("NCCL_DEBUG");
    if (level != NULL && (strcmp(level, "WARN") == 0 || strcmp(level, "INFO") == 0 ||
                          strcmp(level, "TRACE") == 0))
        write_line(STDERR_FILENO, "NCCL emulator: ", last);
    return code;
}

void log_call(const char *format, ...)
{
    const char *prefix = getenv("NCCL_EMULATOR_LOG");
    if (prefix == NULL || *prefix == 0)
        return;
    char path[4096], text[TEXT_BYTES];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    snprintf(path, sizeof path, "%s.%d", prefix, getpid());
    const int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (fd < 0) {
        say("cannot open the log %s", path);
        abort();
    }
    write_line(fd, "", text);
    close(fd);
}

static bool is_in_place(const struct operation_state *op)
{
    const struct call *call = &op->call;
    const char *send = op->sendbuf, *recv = op->recvbuf;
    switch (call->operation) {
    case OP_SEND:
    case OP_RECV:
    case OP_SPLIT:
    case OP_INIT: return false;
    case OP_REDUCE_SCATTER:
        return recv ==
               send + (size_t)op->comm->rank * call->count * type_bytes(call->type);
    case OP_ALL_GATHER:
        return send ==
               recv + (size_t)op->comm->rank * call->count * type_bytes(call->type);
    default: return send == recv;
    }
}

static const char *name_of_redop(const struct call *call)
{
    const int operation = call->operation;
    return operation == OP_ALL_REDUCE || operation == OP_REDUCE ||
                   operation == OP_REDUCE_SCATTER
               ? redop_names[call->redop]
               : "-";
}

void log_operation(const struct operation_state *op)
{
    const struct call *call = &op->call;
    char root[16] = "-", peer[16] = "-";
    if (op->comm == NULL) /* an initialisation, logged by its caller */
        return;
    if (call->operation == OP_SPLIT) {
        log_call("op=Split color=%d key=%d comm=%s rank=%d size=%d seq=%" PRIu64
                 " group=%d",
                 call->color, call->key, op->comm->name, op->comm->rank, op->comm->size,
                 op->number, op->grouped);
        return;
    }
    if (call->operation == OP_SEND || call->operation == OP_RECV)
        snprintf(peer, sizeof peer, "%d", call->root);
    if (call->operation == OP_REDUCE || call->operation == OP_BROADCAST)
        snprintf(root, sizeof root, "%d", call->root);
    log_call("op=%s count=%" PRIu64 " type=%s redop=%s root=%s peer=%s comm=%s rank=%d "
             "size=%d stream=0x%" PRIxPTR " seq=%" PRIu64 " inplace=%d group=%d",
             operation_names[call->operation], call->count, type_names[call->type],
             name_of_redop(call), root, peer, op->comm->name, op->comm->rank,
             op->comm->size, (uintptr_t)op->stream, op->number, is_in_place(op),
             op->grouped);
}
