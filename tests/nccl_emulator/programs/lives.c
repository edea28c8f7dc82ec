/* Two ranks make, use, split, abort and destroy communicators, also from two threads;
 * AddressSanitizer then looks for what was not freed. Exit status 0: all was right. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "nccl_api.h"

enum { N_RANKS = 2, N_ROUNDS = 20, N_ELEMS = 3000 };

static void require(int condition, const char *text)
{
    if (!condition) {
        fprintf(stderr, "lives: %s (%s)\n", text, ncclGetLastError(NULL));
        exit(1);
    }
}

#define REQUIRE(condition) require(condition, #condition)

static void use(ncclComm_t comm, int size)
{
    float *values = malloc(N_ELEMS * sizeof *values);
    for (int i = 0; i < N_ELEMS; i++)
        values[i] = (float)i;
    REQUIRE(ncclAllReduce(values, values, N_ELEMS, ncclFloat32, ncclSum, comm, NULL) ==
            ncclSuccess);
    for (int i = 0; i < N_ELEMS; i++)
        REQUIRE(values[i] == (float)(size * i));
    free(values);
}

static void *abort_soon(void *comm)
{
    usleep(20000);
    REQUIRE(ncclCommAbort(comm) == ncclSuccess);
    return NULL;
}

static void *poll_errors(void *comm)
{
    ncclResult_t error;
    while (ncclCommGetAsyncError(comm, &error) == ncclSuccess)
        usleep(100);
    return NULL;
}

static void live(int rank, ncclUniqueId first_id, int from, int to)
{
    ncclComm_t first, comm, part;
    REQUIRE(ncclCommInitRank(&first, N_RANKS, first_id, rank) == ncclSuccess);
    for (int round = 0; round < N_ROUNDS; round++) {
        ncclUniqueId id;
        if (rank == 0) {
            REQUIRE(ncclGetUniqueId(&id) == ncclSuccess);
            REQUIRE(write(to, &id, sizeof id) == sizeof id);
        } else {
            REQUIRE(read(from, &id, sizeof id) == sizeof id);
        }
        REQUIRE(ncclCommInitRank(&comm, N_RANKS, id, rank) == ncclSuccess);
        REQUIRE(ncclCommSplit(comm, round % 3 ? 0 : rank, -rank, &part, NULL) ==
                ncclSuccess);
        use(part, round % 3 ? N_RANKS : 1);
        REQUIRE(ncclGroupStart() == ncclSuccess);
        use(first, 1); /* queued: its buffer is freed, so the group must not run */
        REQUIRE(ncclBroadcast(NULL, NULL, 1, ncclInt8, 7, comm, NULL) ==
                ncclInvalidArgument);
        REQUIRE(ncclGroupEnd() == ncclInvalidArgument);
        pthread_t aborting, polling;
        REQUIRE(pthread_create(&polling, NULL, poll_errors, comm) == 0);
        REQUIRE(pthread_create(&aborting, NULL, abort_soon, comm) == 0);
        char byte = 0;
        /* Rank 1 waits for a message that nobody sends; so does rank 0. */
        REQUIRE(ncclRecv(&byte, 1, ncclInt8, 1 - rank, comm, NULL) != ncclSuccess);
        pthread_join(aborting, NULL);
        pthread_join(polling, NULL);
        REQUIRE(ncclCommDestroy(comm) == ncclInvalidArgument);
        REQUIRE(ncclCommDestroy(part) == ncclSuccess);
        use(first, N_RANKS);
    }
    REQUIRE(ncclCommDestroy(first) == ncclSuccess);
}

int main(void)
{
    int ids[2], status = 0, failed = 0;
    REQUIRE(pipe(ids) == 0);
    ncclUniqueId id;
    /* The child uses the id of its parent, which is rank 0. */
    REQUIRE(ncclGetUniqueId(&id) == ncclSuccess);
    const pid_t child = fork();
    if (child == 0) {
        live(1, id, ids[0], -1);
        return 0;
    }
    live(0, id, -1, ids[1]);
    waitpid(child, &status, 0);
    failed = !WIFEXITED(status) || WEXITSTATUS(status) != 0;
    return failed;
}
