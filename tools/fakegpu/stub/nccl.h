/* Between nccl.c (NCCL's functions) and meeting.c (how processes meet and wait for each other). */
#pragma once
#include "fake.h"

/* As NCCL numbers them. */
enum { SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, REMOTE_ERROR = 6 };
typedef enum { I8, U8, I32, U32, I64, U64, F16, F32, F64, BF16, E4M3, E5M2, NUM_TYPES } Type;
typedef enum { SUM, PROD, MAX, MIN, AVG, NUM_OPS } Op;
typedef enum { ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, ALL_TO_ALL, BROADCAST, REDUCE, SPLIT, NUM_KINDS } Kind;
typedef struct { char text[128]; } UniqueId;

/* What all ranks of a communicator must say alike when they meet. */
typedef struct {
    Kind kind;
    Type type;
    int op, root;
    size_t count;
} Call;

typedef struct Meeting Meeting; /* the memory that the processes of a communicator share */

typedef struct Comm {
    int number, rank, size;
    char name[128];
    Meeting *meeting; /* NULL for a rank that is alone: all others are taken to send what it sends */
    int file;         /* whose byte number `rank` is locked as long as this process lives */
    int splits;
    bool aborted;
    struct Comm *next; /* all of this process */
} Comm;

typedef struct {
    bool sends;
    void *at;
    size_t size;
    Type type;
    int peer;
} Message;

/* Note the reason of an error, which ncclGetLastError and the log give. Returns `status`. */
Status refuse(Status status, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* The size of an element. */
size_t size_of(Type type);
/* "all_gather of 8 f32". */
const char *described(const Call *call, char *to, size_t size);

/* Meet the other ranks of a new communicator; they have the same name. */
Status enter(Comm *comm);
/* Leave it: ranks that wait for this one are told. */
void leave(Comm *comm);
/* Note what this process does, for the errors of those who wait for it, on whatever communicator. */
void remember_call(Comm *comm, const char *words);
/* Say what this rank calls and sends, and wait until all ranks have. REMOTE_ERROR if one is gone or does not come,
 * INVALID_USAGE if one calls something else. After it `sent_by` is valid until `finish`. */
Status meet(Comm *comm, const Call *call, const void *send, size_t size);
/* What a rank has sent in this collective. */
const char *sent_by(const Comm *comm, int rank, const void *send);
/* This rank has read what it needs. */
void finish(Comm *comm);
/* Send and receive the messages of a group; returns when all have arrived. */
Status deliver(Comm *comm, const Message *messages, size_t number);
