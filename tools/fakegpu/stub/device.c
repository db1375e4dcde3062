/* The runtime (cudart) of a GPU that is not there: the log, memory and copies. (Streams and events are in streams.c.)
 *
 * Memory of the device is memory of the host, and a copy is a memmove at once. */
#include "fake.h"
#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <driver_types.h>

enum { NUM_DEVICES = 8 };
static const size_t TOTAL = 80UL << 30; /* bytes of a device */

/* ---- the log ---- */

static FILE *log_file;
static pthread_once_t log_once = PTHREAD_ONCE_INIT;

static void open_log(void) {
    const char *path = getenv("FAKEGPU_LOG");
    log_file = path ? fopen(path, "w") : NULL;
    if (log_file)
        setvbuf(log_file, NULL, _IOLBF, 0); /* whole lines, also of a process that is killed */
}

static unsigned long log_lines;

unsigned long fake_time(void) { return __atomic_load_n(&log_lines, __ATOMIC_SEQ_CST); }

void fake_log(const char *format, ...) {
    pthread_once(&log_once, open_log);
    __atomic_add_fetch(&log_lines, 1, __ATOMIC_SEQ_CST);
    if (!log_file)
        return;
    va_list arguments;
    va_start(arguments, format);
    flockfile(log_file); /* lines of several threads do not mix */
    vfprintf(log_file, format, arguments);
    putc_unlocked('\n', log_file);
    funlockfile(log_file);
    va_end(arguments);
}

/* A program's own line: what an operator reads and writes, where a step begins. */
void fakegpu_mark(const char *words) { fake_log("%s", words); }

/* ---- memory ---- */

static Block *blocks;
static size_t used;
static pthread_mutex_t blocks_lock = PTHREAD_MUTEX_INITIALIZER;
static __thread int current_device;

static void remember(void *begin, size_t size, bool host) {
    Block *block = malloc(sizeof *block);
    *block = (Block){begin, size, host, current_device, NULL};
    pthread_mutex_lock(&blocks_lock);
    block->next = blocks;
    blocks = block;
    used += host ? 0 : size;
    pthread_mutex_unlock(&blocks_lock);
}

/* Take a block out of the list. Returns its size, 0 if there is none. */
static size_t forget(void *begin) {
    size_t size = 0;
    pthread_mutex_lock(&blocks_lock);
    Block **at = &blocks;
    while (*at && (*at)->begin != begin)
        at = &(*at)->next;
    if (*at) {
        Block *block = *at;
        *at = block->next;
        size = block->size;
        used -= block->host ? 0 : size;
        free(block);
    }
    pthread_mutex_unlock(&blocks_lock);
    return size;
}

const Block *fake_block(const void *address) {
    pthread_mutex_lock(&blocks_lock);
    const Block *block = blocks;
    while (block && !((char *)address >= block->begin && (char *)address < block->begin + block->size))
        block = block->next;
    pthread_mutex_unlock(&blocks_lock);
    return block;
}

bool fake_poison(void) { return getenv("FAKEGPU_POISON") != NULL; }

void *fake_allocate(size_t size, bool host) {
    void *begin = mmap(NULL, size ? size : 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (begin == MAP_FAILED)
        return NULL;
    if (fake_poison() && !host)
        memset(begin, 0xff, size);
    remember(begin, size, host);
    return begin;
}

/* Unmapped, so that whoever uses it later is stopped by the system. */
void fake_release(void *begin) {
    size_t size = forget(begin);
    if (begin)
        munmap(begin, size ? size : 1);
}

Status cudaMalloc(void **to, size_t size) {
    if (used + size > TOTAL)
        return cudaErrorMemoryAllocation;
    if (fake_captures())
        return cudaErrorStreamCaptureUnsupported;
    *to = fake_allocate(size, false);
    fake_log("malloc at=%p n=%zu", *to, size);
    return *to ? 0 : cudaErrorMemoryAllocation;
}

Status cudaMallocAsync(void **to, size_t size, Stream stream) { return cudaMalloc(to, size); }

Status cudaFree(void *begin) {
    if (!begin)
        return 0;
    fake_log("free at=%p", begin);
    fake_release(begin);
    return cudaDeviceSynchronize();
}

Status cudaFreeAsync(void *begin, Stream stream) { return cudaFree(begin); }

Status cudaHostAlloc(void **to, size_t size, unsigned flags) {
    fake_log("pinned n=%zu", size);
    *to = fake_allocate(size, true);
    return *to ? 0 : cudaErrorMemoryAllocation;
}

Status cudaFreeHost(void *begin) {
    fake_release(begin);
    return 0;
}

Status cudaHostRegister(void *begin, size_t size, unsigned flags) {
    remember(begin, size, true);
    return 0;
}

Status cudaHostUnregister(void *begin) {
    forget(begin);
    return 0;
}

Status cudaMemGetInfo(size_t *available, size_t *total) {
    *total = TOTAL;
    *available = TOTAL - used;
    return 0;
}

Status cudaPointerGetAttributes(struct cudaPointerAttributes *of, const void *address) {
    const Block *block = fake_block(address);
    memset(of, 0, sizeof *of);
    of->type = !block ? cudaMemoryTypeUnregistered : block->host ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    of->device = block ? block->device : -1;
    of->devicePointer = block ? (void *)address : NULL;
    of->hostPointer = block && block->host ? (void *)address : NULL;
    return 0;
}

/* ---- memory of torch's allocator, which calls this function of libc10 for a profiler when it gives memory out
 * (`size` > 0) or takes it back: the stub is loaded first, so this one is called ---- */

typedef struct { int8_t type, index; } Device;
typedef struct { Device device; int64_t id; } TorchStream;

/* The calling thread's current stream: that of what torch allocates. */
static Stream torch_stream(int8_t device) {
    static TorchStream (*current)(int8_t);
    static Stream (*handle)(const TorchStream *);
    if (!current) {
        void *library = dlopen("libc10_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
        handle = dlsym(library, "_ZNK3c104cuda10CUDAStream6streamEv");
        current = dlsym(library, "_ZN3c104cuda20getCurrentCUDAStreamEa");
    }
    TorchStream stream = current(device);
    return handle(&stream);
}

void _ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE(void *at, int64_t size, size_t allocated, size_t reserved,
                                                           Device device) {
    if (device.type != 1) /* not CUDA */
        return;
    if (size > 0 && fake_poison())
        memset(at, 0xff, size);
    if (size > 0)
        fake_log("given at=%p n=%zu stream=%p", at, (size_t)size, torch_stream(device.index));
    else
        fake_log("back at=%p n=%zu", at, (size_t)-size);
}

static const char *kind_of_memory(const void *address) {
    const Block *block = fake_block(address);
    return !block ? "pageable" : block->host ? "pinned" : "device";
}

Status cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, Stream stream) {
    fake_log("copy from=%s to=%s n=%zu stream=%p", kind_of_memory(from), kind_of_memory(to), size, stream);
    memmove(to, from, size);
    return 0;
}

Status cudaMemcpy(void *to, const void *from, size_t size, int kind) {
    fake_log("copy from=%s to=%s n=%zu blocking=1", kind_of_memory(from), kind_of_memory(to), size);
    memmove(to, from, size);
    return cudaDeviceSynchronize();
}

Status cudaMemcpyPeerAsync(void *to, int device, const void *from, int peer, size_t size, Stream stream) {
    return cudaMemcpyAsync(to, from, size, 0, stream);
}

Status cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t pitch, size_t width, size_t height,
                         int kind, Stream stream) {
    fake_log("copy from=%s to=%s n=%zu stream=%p", kind_of_memory(from), kind_of_memory(to), width * height, stream);
    for (size_t row = 0; row < height; row++)
        memmove((char *)to + row * to_pitch, (const char *)from + row * pitch, width);
    return 0;
}

Status cudaMemsetAsync(void *to, int value, size_t size, Stream stream) {
    fake_log("memset n=%zu stream=%p", size, stream);
    memset(to, value, size);
    return 0;
}

Status cudaMemset(void *to, int value, size_t size) { return cudaMemsetAsync(to, value, size, NULL); }

void *fake_handle(void) {
    static uintptr_t last = 0x1000; /* streams 0, 1 and 2 have meanings */
    return (void *)__atomic_add_fetch(&last, 0x10, __ATOMIC_SEQ_CST);
}

/* ---- the device ---- */

Status cudaGetDeviceCount(int *to) {
    *to = NUM_DEVICES;
    return 0;
}

Status cudaGetDevice(int *to) {
    *to = current_device;
    return 0;
}

Status cudaSetDevice(int device) {
    current_device = device;
    return 0;
}

/* An H100's. */
Status cudaGetDeviceProperties(struct cudaDeviceProp *of, int device) {
    memset(of, 0, sizeof *of);
    strcpy(of->name, "a GPU that is not there");
    of->major = 9;
    of->multiProcessorCount = 132;
    of->warpSize = 32;
    of->maxThreadsPerBlock = of->maxThreadsDim[0] = of->maxThreadsDim[1] = 1024;
    of->maxThreadsDim[2] = 64;
    of->maxThreadsPerMultiProcessor = 2048;
    of->maxBlocksPerMultiProcessor = 32;
    of->maxGridSize[0] = 2147483647;
    of->maxGridSize[1] = of->maxGridSize[2] = 65535;
    of->sharedMemPerBlock = 48 << 10;
    of->sharedMemPerBlockOptin = 227 << 10;
    of->sharedMemPerMultiprocessor = 228 << 10;
    of->regsPerBlock = of->regsPerMultiprocessor = 64 << 10;
    of->totalConstMem = 64 << 10;
    of->totalGlobalMem = TOTAL;
    of->l2CacheSize = 50 << 20;
    of->memoryBusWidth = 5120;
    of->unifiedAddressing = 1;
    of->pciBusID = device + 1;
    return 0;
}

/* Of the driver too: the numbers of attributes are the same. 1, "it can", for all that are not numbers. */
Status fake_attribute(int *to, int attribute, int device) {
    static const int known[][2] = {
        {cudaDevAttrMaxThreadsPerBlock, 1024},
        {cudaDevAttrMaxSharedMemoryPerBlock, 48 << 10},
        {cudaDevAttrWarpSize, 32},
        {cudaDevAttrMaxRegistersPerBlock, 64 << 10},
        {cudaDevAttrMultiProcessorCount, 132},
        {cudaDevAttrMaxThreadsPerMultiProcessor, 2048},
        {cudaDevAttrComputeCapabilityMajor, 9},
        {cudaDevAttrComputeCapabilityMinor, 0},
        {cudaDevAttrMaxSharedMemoryPerMultiprocessor, 228 << 10},
        {cudaDevAttrMaxRegistersPerMultiprocessor, 64 << 10},
        {cudaDevAttrMaxSharedMemoryPerBlockOptin, 227 << 10},
        {cudaDevAttrMaxBlocksPerMultiprocessor, 32},
    };
    *to = 1;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        *to = known[i][0] == attribute ? known[i][1] : *to;
    return 0;
}

Status cudaDeviceGetAttribute(int *to, int attribute, int device) { return fake_attribute(to, attribute, device); }

Status cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return 0;
}

Status cudaDriverGetVersion(int *to) {
    *to = 13000;
    return 0;
}

Status cudaRuntimeGetVersion(int *to) { return cudaDriverGetVersion(to); }

Status cudaDeviceGetPCIBusId(char *to, int size, int device) {
    snprintf(to, size, "0000:%02x:00.0", device + 1);
    return 0;
}

Status cudaDeviceCanAccessPeer(int *to, int device, int peer) {
    *to = 1;
    return 0;
}

Status cudaGetSymbolAddress(void **to, const void *symbol) {
    static char variables[1 << 20]; /* of kernels, which nobody runs */
    *to = variables;
    return 0;
}

Status cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *to, const void *kernel, int threads, size_t shared) {
    *to = threads && threads < 2048 ? 2048 / threads : 1;
    return 0;
}

Status cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *to, const void *kernel, int threads, size_t shared,
                                                              unsigned flags) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(to, kernel, threads, shared);
}

Status cudaFuncGetAttributes(struct cudaFuncAttributes *of, const void *kernel) {
    memset(of, 0, sizeof *of);
    of->maxThreadsPerBlock = 1024;
    of->numRegs = 32;
    of->binaryVersion = of->ptxVersion = 90;
    of->maxDynamicSharedSizeBytes = 227 << 10;
    return 0;
}

const char *cudaGetErrorName(Status status) {
    return status == cudaErrorMemoryAllocation           ? "out of memory"
           : status == cudaErrorNotReady                 ? "not ready"
           : status == cudaErrorStreamCaptureUnsupported ? "not permitted while a stream is captured"
                                                         : "error";
}
const char *cudaGetErrorString(Status status) { return cudaGetErrorName(status); }
