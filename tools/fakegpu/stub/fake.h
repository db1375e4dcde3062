/* What the parts of the stub share: the log, and the blocks of memory that it gave out. */
#pragma once
#define _GNU_SOURCE
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef void *Stream;
typedef void *Event;
typedef int Status; /* 0 is success in every one of NVIDIA's libraries */

/* Append a line to the file that FAKEGPU_LOG names; without it the line is only counted. */
void fake_log(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* The number of lines so far: whatever the device is given is one. */
unsigned long fake_time(void);

typedef struct Block {
    char *begin;
    size_t size;
    bool host; /* pinned memory of the host, else memory of the device */
    int device;
    struct Block *next;
} Block;

/* The block that an address lies in; NULL for memory that the stub did not give out: pageable memory of the host. */
const Block *fake_block(const void *address);
/* Whether memory of the device is full of NaN when it is given out, so that what nobody wrote is seen. */
bool fake_poison(void);
/* Memory filled with zeros, or as `fake_poison` says, as a block; NULL if there is none. */
void *fake_allocate(size_t size, bool host);
/* Give back what `fake_allocate` returned. */
void fake_release(void *begin);
/* A new handle of a stream, an event or whatever a library makes: a number that was not used before. */
void *fake_handle(void);
/* Wait for all that the device was given: it is done. */
Status cudaDeviceSynchronize(void);
/* Whether the calling thread captures a stream into a graph: it must not wait for the device, nor allocate. */
bool fake_captures(void);
