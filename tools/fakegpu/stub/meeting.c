/* How the processes of a communicator meet, without a network: a file in memory, mapped by all of them.
 *
 * Every wait is bounded by FAKEGPU_WAIT seconds (20 if nothing is said), and ends at once if the process that is waited
 * for is gone: each holds a lock on the file, which the system takes away with the process. NCCL would hang in both
 * cases. An error shows the last calls of both ranks, on all their communicators. */
#include "nccl.h"
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { MOST_RANKS = 16, LINES = 12, WIDTH = 96, QUEUE = 64 };
static const size_t ROOM = 256UL << 20; /* of one rank for what it sends; pages that nobody touches cost nothing */

typedef struct {
    atomic_ulong posted, finished; /* how many collectives this rank has begun, and has read to the end */
    atomic_int here;
    Call call;
    char lines[LINES][WIDTH]; /* the last calls of the process, on any communicator; the newest is number `said` - 1 */
    unsigned said;
} Seat;

typedef struct { /* messages from one rank to another, first in, first out */
    atomic_ulong sent, received;
    struct { size_t at, size; Type type; } queue[QUEUE];
} Channel;

struct Meeting {
    Seat seats[MOST_RANKS];
    Channel channels[MOST_RANKS][MOST_RANKS];
};

static Comm *all_comms;
static pthread_mutex_t comms_lock = PTHREAD_MUTEX_INITIALIZER;

static char *room_of(const Comm *comm, int rank) {
    return (char *)comm->meeting + (sizeof(Meeting) + 4095) / 4096 * 4096 + rank * ROOM;
}

static Seat *seat_of(const Comm *comm, int rank) { return &comm->meeting->seats[rank]; }

/* ---- waiting ---- */

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec * 1e-9;
}

/* A process that is about to come may still be importing torch, or making what the others have made. */
static double limit(bool to_come) {
    const char *wish = getenv("FAKEGPU_WAIT");
    return (wish ? atof(wish) : 20) + (to_come ? 60 : 0);
}

static bool is_gone(const Comm *comm, int rank) {
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = rank, .l_len = 1};
    if (rank == comm->rank || !atomic_load(&seat_of(comm, rank)->here))
        return false;
    return fcntl(comm->file, F_OFD_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
}

/* The last calls of a rank, newest last. */
static void history(const Comm *comm, int rank, char *to, size_t size) {
    const Seat *seat = seat_of(comm, rank);
    size_t at = 0;
    to[0] = 0;
    for (unsigned i = seat->said > LINES ? seat->said - LINES : 0; i < seat->said && at < size; i++)
        at += snprintf(to + at, size - at, "\n    %.*s", WIDTH - 1, seat->lines[i % LINES]);
}

static Status with_logs(Status status, const Comm *comm, int rank, const char *reason) {
    char here[LINES * (WIDTH + 8)], there[LINES * (WIDTH + 8)];
    history(comm, comm->rank, here, sizeof here);
    history(comm, rank, there, sizeof there);
    return refuse(status, "%s\n  the last calls of rank %d:%s\n  the last calls of rank %d:%s", reason, comm->rank,
                  here, rank, there);
}

static Status missing(const Comm *comm, int rank, const char *why) {
    char reason[256];
    snprintf(reason, sizeof reason, "communicator %d of %d ranks: rank %d waits for rank %d, which %s", comm->number,
             comm->size, comm->rank, rank, why);
    return with_logs(REMOTE_ERROR, comm, rank, reason);
}

typedef bool Ready(const Comm *comm, int rank, unsigned long number);

static bool has_come(const Comm *comm, int rank, unsigned long number) { return seat_of(comm, rank)->here; }

/* Wait until a rank is ready. */
static Status wait_for(const Comm *comm, int rank, Ready *ready, unsigned long number) {
    double end = now() + limit(ready == has_come);
    for (long pause = 10000; !ready(comm, rank, number); pause = pause < 500000 ? 2 * pause : pause) {
        if (comm->aborted)
            return refuse(REMOTE_ERROR, "communicator %d: aborted", comm->number);
        if (is_gone(comm, rank) && !ready(comm, rank, number)) /* it may have been ready, and then have ended */
            return missing(comm, rank, "is gone: its process ended, or left the communicator");
        if (now() > end)
            return missing(comm, rank, "does not come: it has called something else, or waits elsewhere");
        nanosleep(&(struct timespec){0, pause}, NULL);
    }
    return 0;
}

static Status wait_for_all(const Comm *comm, Ready *ready, unsigned long number) {
    Status status = 0;
    for (int rank = 0; rank < comm->size && !status; rank++)
        status = wait_for(comm, rank, ready, number);
    return status;
}

static bool has_posted(const Comm *comm, int rank, unsigned long number) {
    return atomic_load(&seat_of(comm, rank)->posted) >= number;
}
static bool has_finished(const Comm *comm, int rank, unsigned long number) {
    return atomic_load(&seat_of(comm, rank)->finished) >= number;
}
static bool has_sent(const Comm *comm, int rank, unsigned long number) {
    return atomic_load(&comm->meeting->channels[rank][comm->rank].sent) >= number;
}
static bool has_received(const Comm *comm, int rank, unsigned long number) {
    return atomic_load(&comm->meeting->channels[comm->rank][rank].received) >= number;
}

/* ---- coming and going ---- */

static void path_of(const Comm *comm, char *to, size_t size) { snprintf(to, size, "/dev/shm/%s", comm->name); }

Status enter(Comm *comm) {
    char path[256];
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = comm->rank, .l_len = 1};
    size_t size = (sizeof(Meeting) + 4095) / 4096 * 4096 + comm->size * ROOM;
    if (comm->size > MOST_RANKS)
        return refuse(INVALID_USAGE, "%d ranks: at most %d processes meet here", comm->size, MOST_RANKS);
    path_of(comm, path, sizeof path);
    comm->file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (comm->file < 0 || ftruncate(comm->file, size) || fcntl(comm->file, F_OFD_SETLK, &lock))
        return refuse(SYSTEM_ERROR, "%s of rank %d: %s", path, comm->rank, strerror(errno));
    comm->meeting = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, comm->file, 0);
    if (comm->meeting == MAP_FAILED)
        return refuse(SYSTEM_ERROR, "%s: %s", path, strerror(errno));
    pthread_mutex_lock(&comms_lock);
    comm->next = all_comms;
    all_comms = comm;
    pthread_mutex_unlock(&comms_lock);
    atomic_store(&seat_of(comm, comm->rank)->here, 1);
    Status status = wait_for_all(comm, has_come, 0);
    unlink(path); /* by everyone: all have opened it, or the communicator is broken */
    return status;
}

/* The memory stays mapped: another thread of this process may be waiting in it. */
void leave(Comm *comm) {
    pthread_mutex_lock(&comms_lock);
    Comm **at = &all_comms;
    while (*at && *at != comm)
        at = &(*at)->next;
    if (*at)
        *at = comm->next;
    pthread_mutex_unlock(&comms_lock);
    comm->aborted = true;
    if (comm->meeting)
        close(comm->file);
}

void remember_call(Comm *comm, const char *words) {
    pthread_mutex_lock(&comms_lock);
    for (Comm *one = all_comms; one; one = one->next) {
        Seat *seat = seat_of(one, one->rank);
        snprintf(seat->lines[seat->said % LINES], WIDTH, "communicator %d: %s", comm->number, words);
        seat->said++;
    }
    pthread_mutex_unlock(&comms_lock);
}

/* ---- collectives ---- */

static Status unlike(const Comm *comm, int rank) {
    char here[WIDTH], there[WIDTH], reason[3 * WIDTH];
    snprintf(reason, sizeof reason, "communicator %d of %d ranks: rank %d calls %s, rank %d calls %s", comm->number,
             comm->size, comm->rank, described(&seat_of(comm, comm->rank)->call, here, sizeof here), rank,
             described(&seat_of(comm, rank)->call, there, sizeof there));
    return with_logs(INVALID_USAGE, comm, rank, reason);
}

Status meet(Comm *comm, const Call *call, const void *send, size_t size) {
    if (!comm->meeting)
        return 0;
    Seat *seat = seat_of(comm, comm->rank);
    unsigned long number = atomic_load(&seat->posted) + 1;
    if (size > ROOM)
        return refuse(INVALID_USAGE, "%zu bytes: a rank can send %zu at once here", size, ROOM);
    Status status = wait_for_all(comm, has_finished, number - 1); /* they may still read what was sent before */
    if (status)
        return status;
    memcpy(room_of(comm, comm->rank), send, size);
    seat->call = *call;
    atomic_store(&seat->posted, number);
    status = wait_for_all(comm, has_posted, number);
    for (int rank = 0; rank < comm->size && !status; rank++)
        if (memcmp(&seat_of(comm, rank)->call, call, sizeof *call))
            status = unlike(comm, rank);
    return status;
}

const char *sent_by(const Comm *comm, int rank, const void *send) {
    return comm->meeting ? room_of(comm, rank) : send;
}

void finish(Comm *comm) {
    if (comm->meeting)
        atomic_fetch_add(&seat_of(comm, comm->rank)->finished, 1);
}

/* ---- messages ---- */

static Status post(Comm *comm, const Message *message, size_t *at) {
    Channel *channel = &comm->meeting->channels[comm->rank][message->peer];
    unsigned long number = atomic_load(&channel->sent);
    if (*at + message->size > ROOM || number - atomic_load(&channel->received) == QUEUE)
        return refuse(INVALID_USAGE, "too many messages, or too long ones, in one group");
    memcpy(room_of(comm, comm->rank) + *at, message->at, message->size);
    channel->queue[number % QUEUE].at = *at;
    channel->queue[number % QUEUE].size = message->size;
    channel->queue[number % QUEUE].type = message->type;
    *at += message->size;
    atomic_store(&channel->sent, number + 1);
    return 0;
}

static Status take(Comm *comm, const Message *message) {
    Channel *channel = &comm->meeting->channels[message->peer][comm->rank];
    unsigned long number = atomic_load(&channel->received);
    Status status = wait_for(comm, message->peer, has_sent, number + 1);
    if (status)
        return status;
    size_t at = channel->queue[number % QUEUE].at, size = channel->queue[number % QUEUE].size;
    if (size != message->size || channel->queue[number % QUEUE].type != message->type) {
        char reason[256];
        snprintf(reason, sizeof reason, "communicator %d: rank %d receives %zu bytes of type %d, rank %d sends %zu of type %d",
                 comm->number, comm->rank, message->size, message->type, message->peer, size,
                 channel->queue[number % QUEUE].type);
        return with_logs(INVALID_USAGE, comm, message->peer, reason);
    }
    memcpy(message->at, room_of(comm, message->peer) + at, size);
    atomic_store(&channel->received, number + 1);
    return 0;
}

/* A rank that is alone receives what it sends to the rank as far on the other side, again and again if that is shorter:
 * all do as this one does. Without such a message it receives zeros. */
static Status mirror(const Comm *comm, const Message *messages, size_t number) {
    for (size_t i = 0; i < number; i++) {
        const Message *to = &messages[i], *from = NULL;
        for (size_t j = 0; j < number && !to->sends && !from; j++)
            if (messages[j].sends && messages[j].size && (to->peer + messages[j].peer - 2 * comm->rank) % comm->size == 0)
                from = &messages[j];
        if (!to->sends && !from)
            memset(to->at, 0, to->size);
        for (size_t at = 0; from && at < to->size; at += from->size)
            memmove((char *)to->at + at, from->at, to->size - at < from->size ? to->size - at : from->size);
    }
    return 0;
}

Status deliver(Comm *comm, const Message *messages, size_t number) {
    size_t at = 0;
    if (!comm->meeting)
        return mirror(comm, messages, number);
    Status status = wait_for_all(comm, has_finished, atomic_load(&seat_of(comm, comm->rank)->finished));
    for (size_t i = 0; i < number && !status; i++)
        status = messages[i].sends ? post(comm, &messages[i], &at) : 0;
    for (size_t i = 0; i < number && !status; i++)
        status = messages[i].sends ? 0 : take(comm, &messages[i]);
    for (int rank = 0; rank < comm->size && !status; rank++)
        status = wait_for(comm, rank, has_received, atomic_load(&comm->meeting->channels[comm->rank][rank].sent));
    return status;
}
