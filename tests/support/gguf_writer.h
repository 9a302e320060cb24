/* SPDX-License-Identifier: Apache-2.0 */
/* Writes heads of GGUF files for tests: numbers are little endian, texts have their length in
 * front. The buffer must be large enough. */
#ifndef EP_TESTS_SUPPORT_GGUF_WRITER_H
#define EP_TESTS_SUPPORT_GGUF_WRITER_H

#include <stdint.h>
#include <string.h>

#define GGUF_MAGIC 0x46554747u

/* Value types. */
enum {
    GGUF_U8 = 0,
    GGUF_U32 = 4,
    GGUF_F32 = 6,
    GGUF_BOOL = 7,
    GGUF_TEXT = 8,
    GGUF_ARRAY = 9,
    GGUF_U64 = 10,
    GGUF_F64 = 12
};

typedef struct gguf_writer {
    uint8_t bytes[65536];
    size_t count;
} gguf_writer;

static inline void gguf_put(gguf_writer *w, size_t bytes, uint64_t value)
{
    for (size_t i = 0; i < bytes; i++) {
        w->bytes[w->count++] = (uint8_t)(value >> (8 * i));
    }
}

static inline void gguf_put_text(gguf_writer *w, const char *text)
{
    gguf_put(w, 8, strlen(text));
    memcpy(w->bytes + w->count, text, strlen(text));
    w->count += strlen(text);
}

static inline void gguf_put_key(gguf_writer *w, const char *name, uint32_t type, size_t bytes,
                                uint64_t value)
{
    gguf_put_text(w, name);
    gguf_put(w, 4, type);
    gguf_put(w, bytes, value);
}

/* Writes the head of an array; the caller writes the elements behind it. */
static inline void gguf_put_array(gguf_writer *w, const char *name, uint32_t type, uint64_t count)
{
    gguf_put_key(w, name, GGUF_ARRAY, 4, type);
    gguf_put(w, 8, count);
}

static inline void gguf_put_head(gguf_writer *w, uint32_t version, uint64_t tensors, uint64_t keys)
{
    gguf_put(w, 4, GGUF_MAGIC);
    gguf_put(w, 4, version);
    gguf_put(w, 8, tensors);
    gguf_put(w, 8, keys);
}

/* dims: columns first. */
static inline void gguf_put_tensor(gguf_writer *w, const char *name, uint32_t rank,
                                   const uint64_t *dims, uint32_t type, uint64_t at)
{
    gguf_put_text(w, name);
    gguf_put(w, 4, rank);
    for (uint32_t i = 0; i < rank; i++) {
        gguf_put(w, 8, dims[i]);
    }
    gguf_put(w, 4, type);
    gguf_put(w, 8, at);
}

#endif
