/* Streams and events of a GPU that is not there, and what the host knows of them.
 *
 * A stream has no queue: what is given to it is done when the call returns. So an order that a program forgot does no
 * harm here; it is read off the log, where every event and wait is a line.
 *
 * Whoever asks whether an event or a stream is done is told what a slow device tells: it is, when the host has waited
 * for it. With "done" at once torch's allocators and ProcessGroupNCCL, which ask all the time, would use memory again
 * while, by the log, it is still read; and as an order in the log the answer would hide races, for the program may have
 * done nothing with it. A program that asks again and again waits, so at last the answer is "done", and an order. */
#include "fake.h"
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <driver_types.h>

enum { PATIENCE = 1000, STREAMS = 1 << 14 };

typedef struct {
    Stream stream;
    unsigned long time; /* of the log, when it was recorded; 0 if it was not */
    unsigned asked;     /* how often, since then */
} Record;

static __thread unsigned long waits;          /* of this thread of the host for the device */
static unsigned long device_done;             /* the time until which the host knows all to be done, */
static unsigned long streams_done[STREAMS]; /* and what one stream was given */

/* How often the calling thread has waited for the device. */
unsigned long fakegpu_waits(void) { return waits; }

static unsigned long *done_of(Stream stream) { return &streams_done[((uintptr_t)stream >> 4) % STREAMS]; }
static bool is_done(Stream stream, unsigned long time) { return time <= device_done || time <= *done_of(stream); }

static void note_done(unsigned long *done, unsigned long time) { *done = time > *done ? time : *done; }

static Status waited(const char *what, const void *handle) {
    if (fake_captures())
        return cudaErrorStreamCaptureUnsupported;
    waits++;
    fake_log("sync %s=%p", what, handle);
    return 0;
}

/* ---- streams ---- */

Status cudaStreamCreateWithPriority(Stream *to, unsigned flags, int priority) {
    *to = fake_handle();
    fake_log("stream stream=%p priority=%d", *to, priority);
    return 0;
}

Status cudaStreamCreateWithFlags(Stream *to, unsigned flags) { return cudaStreamCreateWithPriority(to, flags, 0); }
Status cudaStreamCreate(Stream *to) { return cudaStreamCreateWithPriority(to, 0, 0); }

Status cudaStreamGetPriority(Stream stream, int *priority) {
    *priority = 0;
    return 0;
}

Status cudaDeviceSynchronize(void) {
    Status status = waited("device", NULL);
    if (!status)
        note_done(&device_done, fake_time());
    return status;
}

Status cudaStreamSynchronize(Stream stream) {
    Status status = waited("stream", stream);
    if (!status)
        note_done(done_of(stream), fake_time());
    return status;
}

Status cudaStreamQuery(Stream stream) {
    static __thread unsigned asked;
    if (is_done(stream, fake_time())) /* nothing was given to any stream since */
        return 0;
    if (++asked % PATIENCE)
        return cudaErrorNotReady;
    fake_log("query stream=%p", stream);
    note_done(done_of(stream), fake_time());
    return 0;
}

Status cudaStreamWaitEvent(Stream stream, Event event, unsigned flags) {
    fake_log("wait stream=%p event=%p", stream, event);
    return 0;
}

Status cudaLaunchHostFunc(Stream stream, void (*run)(void *), void *data) {
    run(data);
    return 0;
}

Status cudaStreamAddCallback(Stream stream, void (*run)(Stream, int, void *), void *data, unsigned flags) {
    run(stream, 0, data);
    return 0;
}

/* ---- events ---- */

Status cudaEventCreateWithFlags(Event *to, unsigned flags) {
    *to = calloc(1, sizeof(Record));
    return 0;
}

Status cudaEventCreate(Event *to) { return cudaEventCreateWithFlags(to, 0); }

Status cudaEventRecord(Event event, Stream stream) {
    fake_log("record stream=%p event=%p", stream, event);
    *(Record *)event = (Record){stream, fake_time()};
    return 0;
}

Status cudaEventRecordWithFlags(Event event, Stream stream, unsigned flags) { return cudaEventRecord(event, stream); }

Status cudaEventSynchronize(Event event) {
    Status status = waited("event", event);
    if (!status)
        note_done(done_of(((Record *)event)->stream), ((Record *)event)->time);
    return status;
}

/* ProcessGroupNCCL's own threads, which ask for ever; what they learn is no order for the program. */
static bool is_of_nccl(void) {
    static __thread int known; /* 1: a thread of the program, 2: one of ProcessGroupNCCL */
    char name[16] = "";
    if (!known) {
        pthread_getname_np(pthread_self(), name, sizeof name);
        known = strncmp(name, "pt_nccl", 7) ? 1 : 2;
    }
    return known == 2;
}

Status cudaEventQuery(Event event) {
    Record *record = event;
    if (is_done(record->stream, record->time))
        return 0;
    if (is_of_nccl() || ++record->asked < PATIENCE)
        return cudaErrorNotReady;
    fake_log("query event=%p", event);
    note_done(done_of(record->stream), record->time);
    return 0;
}

Status cudaEventElapsedTime(float *to, Event from, Event until) {
    *to = 1;
    return 0;
}
