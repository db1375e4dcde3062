/* CUDA graphs of a GPU that is not there: one stream at a time is captured, which the log says, and a launch of the
 * graph is a line of the log. What is called between begin and end is in the log as if it ran. */
#include "fake.h"
#include <driver_types.h>

static Stream stream_captured;
static unsigned long long captures; /* their number; the last one is the one that is under way */
static bool under_way;
static __thread bool mine;
static __thread int mode = cudaStreamCaptureModeGlobal; /* of the thread: torch's allocator relaxes it for cudaMalloc */

bool fake_captures(void) { return mine && mode != cudaStreamCaptureModeRelaxed; }

Status cudaThreadExchangeStreamCaptureMode(int *with) {
    int before = mode;
    mode = *with;
    *with = before;
    return 0;
}

Status cudaStreamBeginCapture(Stream stream, int how) {
    if (under_way)
        return cudaErrorIllegalState;
    under_way = mine = true;
    stream_captured = stream;
    fake_log("capture begin=%llu stream=%p", ++captures, stream);
    return 0;
}

Status cudaStreamEndCapture(Stream stream, void **graph) {
    if (!mine || stream != stream_captured)
        return cudaErrorIllegalState;
    under_way = mine = false;
    *graph = (void *)(uintptr_t)captures;
    fake_log("capture end=%llu", captures);
    return 0;
}

Status cudaStreamIsCapturing(Stream stream, int *to) {
    bool is = under_way && stream == stream_captured;
    *to = is ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return 0;
}

Status cudaStreamGetCaptureInfo(Stream stream, int *to, unsigned long long *id) {
    if (id)
        *id = captures;
    return cudaStreamIsCapturing(stream, to);
}

/* One node stands for all: torch warns of a graph without any. */
Status cudaGraphGetNodes(void *graph, void **nodes, size_t *number) {
    *number = 1;
    return 0;
}

Status cudaGraphInstantiateWithFlags(void **to, void *graph, unsigned long long flags) {
    *to = graph;
    return 0;
}

Status cudaGraphLaunch(void *graph, Stream stream) {
    fake_log("graph number=%zu stream=%p", (size_t)graph, stream);
    return 0;
}
