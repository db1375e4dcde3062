/* NCCL between processes of one host: real bytes, moved at once, and errors where NCCL would hang or be undefined.
 *
 * A collective returns when all ranks have called it: so ranks that call other collectives, or the same on two
 * communicators in another order (which NCCL forbids, and which ends in a hang if its kernels do not fit side by side),
 * come to an error. With FAKEGPU_ALONE a process is one rank of any number, and the others send what it sends. */
#include "nccl.h"
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

static const char *TYPES[] = {"i8", "u8", "i32", "u32", "i64", "u64", "f16", "f32", "f64", "bf16", "e4m3", "e5m2"};
static const size_t SIZES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
static const char *OPS[] = {"sum", "product", "max", "min", "mean"};
static const char *KINDS[] = {"all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "reduce", "split"};
static __thread char reason[4096];

Status refuse(Status status, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(reason, sizeof reason, format, arguments);
    va_end(arguments);
    fake_log("refused status=%d", status);
    fprintf(stderr, "fakegpu: %s\n", reason);
    return status;
}

const char *ncclGetLastError(Comm *comm) { return reason; }
const char *ncclGetErrorString(Status status) { return status ? "refused by the GPU that is not there" : "no error"; }
size_t size_of(Type type) { return SIZES[type]; }

const char *described(const Call *call, char *to, size_t size) {
    bool adds = call->kind == REDUCE_SCATTER || call->kind == ALL_REDUCE || call->kind == REDUCE;
    snprintf(to, size, "%s%s%s of %zu %s, root %d", KINDS[call->kind], adds ? " by " : "", adds ? OPS[call->op] : "",
             call->count, TYPES[call->type], call->root);
    return to;
}

/* ---- communicators ---- */

static Comm *new_comm(const char *name, int size, int rank) {
    static int number;
    Comm *comm = calloc(1, sizeof *comm);
    comm->number = __atomic_add_fetch(&number, 1, __ATOMIC_SEQ_CST);
    comm->size = size;
    comm->rank = rank;
    snprintf(comm->name, sizeof comm->name, "%s", name);
    fake_log("communicator comm=%d ranks=%d rank=%d", comm->number, size, rank);
    return comm;
}

Status ncclGetVersion(int *to) {
    *to = 22907;
    return 0;
}

Status ncclGetUniqueId(UniqueId *id) {
    uint64_t random[2];
    if (getrandom(random, sizeof random, 0) != sizeof random)
        return refuse(SYSTEM_ERROR, "getrandom");
    memset(id, 0, sizeof *id);
    snprintf(id->text, sizeof id->text, "fakegpu-%016lx%016lx", random[0], random[1]);
    return 0;
}

Status ncclCommInitRankConfig(Comm **to, int size, UniqueId id, int rank, void *config) {
    *to = new_comm(id.text, size, rank);
    return size > 1 && !getenv("FAKEGPU_ALONE") ? enter(*to) : 0;
}

Status ncclCommInitRank(Comm **to, int size, UniqueId id, int rank) {
    return ncclCommInitRankConfig(to, size, id, rank, NULL);
}

Status ncclCommInitRankScalable(Comm **to, int size, int rank, int number, UniqueId *ids, void *config) {
    return ncclCommInitRankConfig(to, size, ids[0], rank, config);
}

/* The ranks of one color make a communicator, in the order of their keys. */
Status ncclCommSplit(Comm *comm, int color, int key, Comm **to, void *config) {
    int wish[2] = {color, key}, size = 0, rank = 0;
    char name[sizeof comm->name];
    if (comm->size > 1 && !comm->meeting)
        return refuse(INVALID_USAGE, "a rank that is alone cannot split: leave out init_process_group's device_id");
    Status status = meet(comm, &(Call){SPLIT}, wish, sizeof wish);
    for (int peer = 0; peer < comm->size && !status; peer++) {
        const int *other = (const int *)sent_by(comm, peer, wish);
        size += other[0] == color;
        rank += other[0] == color && (other[1] < key || (other[1] == key && peer < comm->rank));
    }
    finish(comm);
    snprintf(name, sizeof name, "%.80s.%d.%x", comm->name, comm->splits++, color);
    *to = NULL;
    if (status || color < 0) /* NCCL_SPLIT_NOCOLOR: a rank of no group */
        return status;
    *to = new_comm(name, size, rank);
    return size > 1 ? enter(*to) : 0;
}

Status ncclCommDestroy(Comm *comm) {
    if (comm && !comm->aborted)
        leave(comm);
    return 0;
}

/* What was under way has ended: ProcessGroupNCCL asks until it has. */
Status ncclCommFinalize(Comm *comm) { return cudaDeviceSynchronize(); }
Status ncclCommAbort(Comm *comm) { return ncclCommDestroy(comm) || ncclCommFinalize(comm); }

Status ncclCommCount(Comm *comm, int *to) {
    *to = comm->size;
    return 0;
}

Status ncclCommUserRank(Comm *comm, int *to) {
    *to = comm->rank;
    return 0;
}

Status ncclCommGetAsyncError(Comm *comm, int *to) { return *to = 0; }

Status ncclRedOpCreatePreMulSum(int *op, void *scalar, Type type, int residence, Comm *comm) {
    return refuse(INVALID_USAGE, "sums of what is multiplied first are not made here");
}

/* ---- registered memory ---- */

Status ncclMemAlloc(void **to, size_t size) {
    fake_log("registered n=%zu", size);
    *to = fake_allocate(size, false);
    return *to ? 0 : SYSTEM_ERROR;
}

Status ncclMemFree(void *begin) {
    fake_release(begin);
    return 0;
}

Status ncclCommRegister(Comm *comm, void *begin, size_t size, void **to) {
    *to = fake_handle();
    fake_log("register comm=%d n=%zu", comm->number, size);
    return 0;
}

Status ncclCommWindowRegister(Comm *comm, void *begin, size_t size, void **to, int flags) {
    return ncclCommRegister(comm, begin, size, to);
}

/* ---- numbers ---- */

static double at_float(const void *x, Type type, size_t i) {
    uint32_t bits;
    float value;
    if (type == F64)
        return ((const double *)x)[i];
    if (type == F32)
        return ((const float *)x)[i];
    if (type == F16)
        return ((const _Float16 *)x)[i];
    bits = (uint32_t)((const uint16_t *)x)[i] << 16;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Rounded to the nearest, ties to even. */
static void put_float(void *x, Type type, size_t i, double number) {
    float value = (float)number;
    uint32_t bits;
    if (type == F64)
        ((double *)x)[i] = number;
    else if (type == F32)
        ((float *)x)[i] = value;
    else if (type == F16)
        ((_Float16 *)x)[i] = (_Float16)value;
    else {
        memcpy(&bits, &value, sizeof bits);
        bool is_nan = value != value;
        ((uint16_t *)x)[i] = is_nan ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    }
}

static int64_t at_whole(const void *x, Type type, size_t i) {
    switch (type) {
    case I8: return ((const int8_t *)x)[i];
    case U8: return ((const uint8_t *)x)[i];
    case I32: return ((const int32_t *)x)[i];
    case U32: return ((const uint32_t *)x)[i];
    default: return ((const int64_t *)x)[i];
    }
}

static void put_whole(void *x, Type type, size_t i, int64_t number) {
    memcpy((char *)x + i * size_of(type), &number, size_of(type)); /* the low bytes come first */
}

#define COMBINED(a, b, op) ((op) == PROD ? (a) * (b) : (op) == MAX ? ((a) > (b) ? (a) : (b)) : (op) == MIN ? ((a) < (b) ? (a) : (b)) : (a) + (b))

static void reduce_floats(const Comm *comm, const Call *call, const void *send, size_t from, size_t i, void *to) {
    double total = at_float(sent_by(comm, 0, send), call->type, from + i);
    for (int rank = 1; rank < comm->size; rank++) {
        double other = at_float(sent_by(comm, rank, send), call->type, from + i);
        total = COMBINED(total, other, call->op);
    }
    put_float(to, call->type, i, call->op == AVG ? total / comm->size : total);
}

static void reduce_whole(const Comm *comm, const Call *call, const void *send, size_t from, size_t i, void *to) {
    int64_t total = at_whole(sent_by(comm, 0, send), call->type, from + i);
    for (int rank = 1; rank < comm->size; rank++) {
        int64_t other = at_whole(sent_by(comm, rank, send), call->type, from + i);
        total = COMBINED(total, other, call->op);
    }
    put_whole(to, call->type, i, call->op == AVG ? total / comm->size : total);
}

/* Reduce `call->count` elements that begin with number `from` of what each rank sent. */
static void reduce(const Comm *comm, const Call *call, const void *send, size_t from, void *to) {
    bool whole = call->type < F16;
    for (size_t i = 0; i < call->count; i++)
        (whole ? reduce_whole : reduce_floats)(comm, call, send, from, i, to);
}

/* ---- collectives ---- */

static bool is_bad(const void *at) {
    const Block *block = getenv("NCCL_CHECK_POINTERS") ? fake_block(at) : NULL;
    return getenv("NCCL_CHECK_POINTERS") && (!block || block->host);
}

static Status check(const Comm *comm, const Call *call, const void *send, const void *receive) {
    bool adds = call->kind == REDUCE_SCATTER || call->kind == ALL_REDUCE || call->kind == REDUCE;
    bool sends = call->kind != BROADCAST || comm->rank == call->root;
    bool receives = call->kind != REDUCE || comm->rank == call->root;
    if (call->type < 0 || call->type >= NUM_TYPES || call->op < 0 || call->op >= NUM_OPS)
        return refuse(INVALID_ARGUMENT, "%s: type %d, operation %d", KINDS[call->kind], call->type, call->op);
    if (call->root < 0 || call->root >= comm->size)
        return refuse(INVALID_ARGUMENT, "%s: root %d of %d ranks", KINDS[call->kind], call->root, comm->size);
    if (adds && call->type >= E4M3)
        return refuse(INVALID_ARGUMENT, "%s of %s: float8 is sent here, and not added", KINDS[call->kind], TYPES[call->type]);
    if ((sends && is_bad(send)) || (receives && is_bad(receive)))
        return refuse(INVALID_ARGUMENT, "%s of %zu %s: %p or %p is no memory of the device", KINDS[call->kind],
                      call->count, TYPES[call->type], send, receive);
    return 0;
}

/* Bytes that a rank sends. */
static size_t sent_size(const Comm *comm, const Call *call) {
    bool to_each = call->kind == REDUCE_SCATTER || call->kind == ALL_TO_ALL;
    bool nothing = call->kind == BROADCAST && comm->rank != call->root;
    return nothing ? 0 : call->count * size_of(call->type) * (to_each ? comm->size : 1);
}

static void receive_into(Comm *comm, const Call *call, const void *send, char *to) {
    size_t size = call->count * size_of(call->type);
    for (int rank = 0; rank < comm->size && (call->kind == ALL_GATHER || call->kind == ALL_TO_ALL); rank++)
        memmove(to + rank * size, sent_by(comm, rank, send) + (call->kind == ALL_TO_ALL ? comm->rank * size : 0), size);
    if (call->kind == BROADCAST)
        memmove(to, sent_by(comm, call->root, send), size);
    if (call->kind == ALL_REDUCE || (call->kind == REDUCE && comm->rank == call->root))
        reduce(comm, call, send, 0, to);
    if (call->kind == REDUCE_SCATTER)
        reduce(comm, call, send, comm->rank * call->count, to);
}

/* The first of `n` numbers that has all bits set, as memory that nobody wrote under FAKEGPU_POISON; -1 if none has.
 * Other NaN have other bits. Bytes are not looked at: they may be anything. */
static ptrdiff_t unwritten(const void *at, size_t n, Type type) {
    static const char ones[8] = {-1, -1, -1, -1, -1, -1, -1, -1};
    if (fake_poison() && (type == F16 || type == F32 || type == F64 || type == BF16))
        for (size_t i = 0; i < n; i++)
            if (!memcmp((const char *)at + i * size_of(type), ones, size_of(type)))
                return i;
    return -1;
}

static Status check_written(const char *kind, const void *at, size_t n, Type type) {
    ptrdiff_t number = unwritten(at, n, type);
    return number < 0 ? 0 : refuse(INVALID_ARGUMENT, "%s of %zu %s: nobody wrote element %td of what is sent", kind, n,
                                   TYPES[type], number);
}

static Status collective(Comm *comm, Call call, const void *send, void *receive, Stream stream) {
    char words[128];
    Status status = check(comm, &call, send, receive);
    if (!status)
        status = check_written(KINDS[call.kind], send, sent_size(comm, &call) / size_of(call.type), call.type);
    if (status)
        return status;
    fake_log("nccl kind=%s comm=%d ranks=%d n=%zu size=%zu type=%s stream=%p send=%p receive=%p", KINDS[call.kind],
             comm->number, comm->size, call.count, size_of(call.type), TYPES[call.type], stream, send, receive);
    remember_call(comm, described(&call, words, sizeof words));
    if (!call.count)
        return 0; /* as NCCL does: nobody waits */
    status = meet(comm, &call, send, sent_size(comm, &call));
    if (!status)
        receive_into(comm, &call, send, receive);
    finish(comm);
    return status;
}

Status ncclAllGather(const void *send, void *receive, size_t n, Type type, Comm *comm, Stream stream) {
    return collective(comm, (Call){ALL_GATHER, type, 0, 0, n}, send, receive, stream);
}

Status ncclReduceScatter(const void *send, void *receive, size_t n, Type type, int op, Comm *comm, Stream stream) {
    return collective(comm, (Call){REDUCE_SCATTER, type, op, 0, n}, send, receive, stream);
}

Status ncclAllReduce(const void *send, void *receive, size_t n, Type type, int op, Comm *comm, Stream stream) {
    return collective(comm, (Call){ALL_REDUCE, type, op, 0, n}, send, receive, stream);
}

Status ncclAlltoAll(const void *send, void *receive, size_t n, Type type, Comm *comm, Stream stream) {
    return collective(comm, (Call){ALL_TO_ALL, type, 0, 0, n}, send, receive, stream);
}

Status ncclBroadcast(const void *send, void *receive, size_t n, Type type, int root, Comm *comm, Stream stream) {
    return collective(comm, (Call){BROADCAST, type, 0, root, n}, send, receive, stream);
}

Status ncclBcast(void *x, size_t n, Type type, int root, Comm *comm, Stream stream) {
    return ncclBroadcast(x, x, n, type, root, comm, stream);
}

Status ncclReduce(const void *send, void *receive, size_t n, Type type, int op, int root, Comm *comm, Stream stream) {
    return collective(comm, (Call){REDUCE, type, op, root, n}, send, receive, stream);
}

/* ---- messages, which start together at the end of their group ---- */

enum { MOST_MESSAGES = 4096 };
static __thread int depth; /* of groups inside groups */
static __thread size_t waiting;
static __thread struct {
    Comm *comm;
    Message message;
} group[MOST_MESSAGES];

/* Deliver the messages of the first communicator of the group, and keep the others. */
static Status deliver_first(void) {
    static __thread Message messages[MOST_MESSAGES];
    Comm *comm = group[0].comm;
    size_t number = 0, others = 0;
    for (size_t i = 0; i < waiting; i++)
        if (group[i].comm == comm)
            messages[number++] = group[i].message;
        else
            group[others++] = group[i];
    waiting = others;
    return deliver(comm, messages, number);
}

static Status deliver_all(void) {
    Status status = 0;
    while (waiting && !status)
        status = deliver_first();
    waiting = 0;
    return status;
}

static Status message(bool sends, void *at, size_t n, Type type, int peer, Comm *comm, Stream stream) {
    char words[128];
    if (n && is_bad(at))
        return refuse(INVALID_ARGUMENT, "a message of %zu %s: %p is no memory of the device", n, TYPES[type], at);
    if (peer < 0 || peer >= comm->size || waiting == MOST_MESSAGES)
        return refuse(INVALID_ARGUMENT, "a message: peer %d of %d ranks", peer, comm->size);
    if (sends && check_written("a message", at, n, type))
        return INVALID_ARGUMENT;
    fake_log("nccl kind=%s comm=%d ranks=%d n=%zu size=%zu type=%s stream=%p %s=%p peer=%d", sends ? "send" : "receive",
             comm->number, comm->size, n, size_of(type), TYPES[type], stream, sends ? "send" : "receive", at, peer);
    snprintf(words, sizeof words, "%s rank %d %zu %s", sends ? "send to" : "receive from", peer, n, TYPES[type]);
    remember_call(comm, words);
    if (n)
        group[waiting++] = (typeof(group[0])){comm, {sends, at, n * size_of(type), type, peer}};
    return depth ? 0 : deliver_all();
}

Status ncclSend(const void *at, size_t n, Type type, int peer, Comm *comm, Stream stream) {
    return message(true, (void *)at, n, type, peer, comm, stream);
}

Status ncclRecv(void *at, size_t n, Type type, int peer, Comm *comm, Stream stream) {
    return message(false, at, n, type, peer, comm, stream);
}

Status ncclGroupStart(void) {
    depth++;
    return 0;
}

Status ncclGroupEnd(void) { return --depth ? 0 : deliver_all(); }
