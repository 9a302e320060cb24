/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The w8a8 part of the AVX-512 VNNI kernel: by register tiles of up to 6 rows x 64 outputs, four k
 * per step. The instruction takes unsigned by signed, so rows are stored as q + 128 and -128 times
 * the sum of an output's weights is added: last, because a panel ends with these numbers, and they
 * come from memory while its lines are used. All of it is modulo 2^32 and the true sum fits
 * (EP_W8A8_COLUMNS_MAX), so sums are exact and the bits those of every other kernel.
 */
#include "kernels/ffn_int8.h"
#include "kernels/x86/ffn_avx512.h"
#include "kernels/x86/ffn_x86.h"

#define INLINE EP_AVX512_INLINE
#define VECTORS 4       /* of 16 outputs: one panel line */
#define LINE_BYTES 256u /* of a panel: a quad of 64 outputs */
#define ROUNDED 64u     /* inputs rounded at a time: 16 quads */
/* The most lines of a block, as in the bf16 kernel. */
#define FEW_ROWS 32u
#define FEW_ROWS_BLOCK 512u
#define WIDE_BLOCK 1024u
/* Fetched that far ahead while weights stream in and each line is used by one chunk. */
#define STREAM_LINES 8u

/* What a tile fetches into the second level cache while it computes: cache lines from next on, per
 * line of b. */
typedef struct {
    const uint8_t *next;
    size_t step;
} prefetch;

/* What follows a panel's lines, and the scales of a tile's rows. */
typedef struct {
    const float *weight_scales;
    const int32_t *offsets;
    const float *row_scales;
    bool first; /* no sums in c yet */
    bool last;  /* c gets the results */
} edges;

/* One register tile over n lines. rows and fetched are constants wherever this is inlined. */
INLINE void tile(const int rows, const int fetched, prefetch ahead, const int8_t *a,
                 const uint8_t *b, uint32_t n, const edges *e, float *c)
{
    __m512i acc[EP_FFN_CHUNK_ROWS][VECTORS];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) {
            acc[r][j] = e->first ? _mm512_setzero_si512()
                                 : _mm512_load_si512(c + r * EP_FFN_PANEL + 16 * j);
        }
    }
    for (uint32_t line = 0; line < n; line++) {
        __m512i w[VECTORS];
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) {
            w[j] = _mm512_load_si512(b + 64 * j);
        }
#pragma GCC unroll 4
        for (int q = 0; q < fetched; q++) {
            _mm_prefetch((const char *)ahead.next + 64 * q, _MM_HINT_T1);
        }
        ahead.next += ahead.step;
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            int32_t quad;
            __builtin_memcpy(&quad, a + 4 * r, sizeof(quad));
            const __m512i x = _mm512_set1_epi32(quad);
#pragma GCC unroll 4
            for (int j = 0; j < VECTORS; j++) {
                acc[r][j] = _mm512_dpbusd_epi32(acc[r][j], x, w[j]);
            }
        }
        a += 4 * rows;
        b += LINE_BYTES;
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) {
            float *to = c + r * EP_FFN_PANEL + 16 * j;
            if (e->last) {
                const __m512i sum =
                    _mm512_add_epi32(acc[r][j], _mm512_load_si512(e->offsets + 16 * j));
                const __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(sum),
                                                    _mm512_load_ps(e->weight_scales + 16 * j));
                _mm512_store_ps(to, _mm512_mul_ps(scaled, _mm512_set1_ps(e->row_scales[r])));
            } else {
                _mm512_store_si512(to, acc[r][j]);
            }
        }
    }
}

typedef void (*tile_func)(prefetch ahead, const int8_t *a, const uint8_t *b, uint32_t n,
                          const edges *e, float *c);

/* How many cache lines a tile fetches per line of b: none, its share of the next block in one or
 * two, whole lines. */
#define TILE(rows, name, fetched)                                                                  \
    static void tile_##name##_##rows(prefetch ahead, const int8_t *a, const uint8_t *b,            \
                                     uint32_t n, const edges *e, float *c)                         \
    {                                                                                              \
        tile(rows, fetched, ahead, a, b, n, e, c);                                                 \
    }
#define TILES(name, fetched)                                                                       \
    TILE(1, name, fetched)                                                                         \
    TILE(2, name, fetched)                                                                         \
    TILE(3, name, fetched)                                                                         \
    TILE(4, name, fetched)                                                                         \
    TILE(5, name, fetched)                                                                         \
    TILE(6, name, fetched)                                                                         \
    static const tile_func tiles_##name[EP_FFN_CHUNK_ROWS] = {tile_##name##_1, tile_##name##_2,    \
                                                              tile_##name##_3, tile_##name##_4,    \
                                                              tile_##name##_5, tile_##name##_6};

TILES(none, 0)
TILES(one, 1)
TILES(two, 2)
TILES(whole, 4)

/* One chunk: the weights stream through once. The last lines fetch the first ones of the next
 * panel. */
static void stream_panel(const int8_t *a, uint32_t rows, const uint8_t *panel, uint32_t lines,
                         const uint8_t *next, edges e, float *c)
{
    const uint32_t inside = lines > STREAM_LINES ? lines - STREAM_LINES : 0;
    prefetch ahead = {.next = panel + STREAM_LINES * LINE_BYTES, .step = LINE_BYTES};
    e.first = true;
    if (inside > 0) {
        e.last = false;
        tiles_whole[rows - 1](ahead, a, panel, inside, &e, c);
        e.first = false;
    }
    e.last = true;
    ahead.next = next == NULL ? panel : next;
    (next == NULL ? tiles_none : tiles_whole)[rows - 1](ahead, a + (size_t)inside * 4 * rows,
                                                        panel + (size_t)inside * LINE_BYTES,
                                                        lines - inside, &e, c);
}

/* Where the rows of a panel's products go when they are complete; batch NULL: nowhere. */
typedef struct {
    const ep_ffn_batch *batch;
    uint32_t first;
    uint32_t count;
} destination;

static void write_rows(const destination *to, size_t first_row, uint32_t rows, const float *c)
{
    for (size_t r = first_row; to->batch != NULL && r < first_row + rows; r++) {
        ep_avx512_write_row(c + r * EP_FFN_PANEL, to->count, to->batch->out_dtype,
                            to->batch->rows[r].out, to->first);
    }
}

/* Before the arithmetic that ends in them. */
static void fetch_outputs(const destination *to, uint32_t first_row, uint32_t rows)
{
    if (to->batch != NULL) {
        ep_avx512_fetch_outputs(to->batch, first_row, rows, to->first, to->count);
    }
}

/* Blocks of one length, so that each fetches all of the next one. */
static uint32_t block_lines(uint32_t rows, uint32_t lines)
{
    const uint32_t most = rows <= FEW_ROWS ? FEW_ROWS_BLOCK : WIDE_BLOCK;
    const uint32_t count = (lines + most - 1) / most;
    return (lines + count - 1) / count;
}

/*
 * Blocks of lines, all chunks per block. While a block is used from the near caches every chunk
 * fetches its share of the next one, evenly, so that loading hides behind arithmetic. Behind the
 * last block lies the next panel.
 */
static void panel_to(const destination *to, const int8_t *a, uint32_t rows, const uint8_t *panel,
                     uint32_t k_count, const float *row_scales, const uint8_t *next, float *c)
{
    const uint32_t lines = ep_ffn_quads(k_count);
    const ep_ffn_chunks chunks = ep_ffn_chunks_of(rows);
    edges e = {.weight_scales = ep_ffn_int8_weight_scales(panel, k_count),
               .offsets = ep_ffn_int8_offsets(panel, k_count),
               .row_scales = row_scales};
    for (uint32_t i = 0; i < 8; i++) {
        _mm_prefetch((const char *)e.weight_scales + 64 * (size_t)i, _MM_HINT_T1);
    }
    if (chunks.count == 1) {
        fetch_outputs(to, 0, rows);
        stream_panel(a, rows, panel, lines, next, e, c);
        write_rows(to, 0, rows, c);
        return;
    }
    const size_t share = (LINE_BYTES + chunks.count - 1) / chunks.count;
    const tile_func *fetching = share > 64 ? tiles_two : tiles_one;
    const uint32_t block = block_lines(rows, lines);
    for (uint32_t line = 0; line < lines; line += block) {
        const uint32_t n = lines - line < block ? lines - line : block;
        const uint8_t *b = panel + (size_t)line * LINE_BYTES;
        e.first = line == 0;
        e.last = line + n == lines;
        const uint8_t *behind = e.last ? next : b + (size_t)n * LINE_BYTES;
        const tile_func *tiles = behind == NULL ? tiles_none : fetching;
        for (uint32_t chunk = 0; chunk < chunks.count; chunk++) {
            const uint32_t chunk_rows = ep_ffn_chunk_rows(&chunks, chunk);
            const uint32_t first_row = ep_ffn_chunk_first_row(&chunks, chunk);
            const int8_t *x = a + 4 * ((size_t)first_row * lines + (size_t)line * chunk_rows);
            prefetch ahead = {
                .next = behind == NULL ? b : behind + (size_t)chunk * n * LINE_BYTES / chunks.count,
                .step = share};
            e.row_scales = row_scales + first_row;
            if (e.last) {
                fetch_outputs(to, first_row, chunk_rows);
            }
            tiles[chunk_rows - 1](ahead, x, b, n, &e, c + (size_t)first_row * EP_FFN_PANEL);
            if (e.last) {
                write_rows(to, first_row, chunk_rows, c);
            }
        }
    }
}

void ep_ffn_avx512vnni_int8_panel(const int8_t *a, uint32_t rows, const uint8_t *panel,
                                  uint32_t k_count, const float *row_scales, const uint8_t *next,
                                  float *c)
{
    panel_to(&(destination){.batch = NULL}, a, rows, panel, k_count, row_scales, next, c);
}

void ep_ffn_avx512vnni_int8_panel_to_rows(const int8_t *a, const ep_ffn_batch *batch,
                                          const uint8_t *panel, uint32_t k_count,
                                          const float *row_scales, const uint8_t *next,
                                          uint32_t first, uint32_t count, float *c)
{
    panel_to(&(destination){.batch = batch, .first = first, .count = count}, a, batch->rows_count,
             panel, k_count, row_scales, next, c);
}

/* ---- rows to int8 ---- */

/* How whole vectors of inputs are read: the common forms have code of their own. */
typedef enum { INPUTS_ANY, INPUTS_BF16, INPUTS_F32 } inputs;

INLINE inputs inputs_of(const ep_ffn_batch *batch)
{
    return batch->weight_on_input            ? INPUTS_ANY
           : batch->x_dtype == EP_DTYPE_BF16 ? INPUTS_BF16
           : batch->x_dtype == EP_DTYPE_F32  ? INPUTS_F32
                                             : INPUTS_ANY;
}

/* next: a row that is wanted soon, fetched meanwhile; rows of callers come from memory. */
INLINE float row_scale(const inputs form, const ep_ffn_batch *batch, const ep_ffn_row *row,
                       const ep_ffn_row *next, uint32_t k_count)
{
    const uint8_t *x = row->x;
    const __m512i sign_off = _mm512_set1_epi32(0x7fffffff);
    __m512i greatest = _mm512_setzero_si512();
    uint32_t k = 0;
    if (form == INPUTS_BF16) {
        __m512i halves = greatest;
        for (; k + 32 <= k_count; k += 32) {
            const __m512i both = _mm512_loadu_si512(x + 2 * (size_t)k);
            halves = _mm512_max_epu16(halves, _mm512_and_si512(both, _mm512_set1_epi16(0x7fff)));
            _mm_prefetch((const char *)next->x + 2 * (size_t)k, _MM_HINT_T0);
        }
        greatest = _mm512_max_epu32(_mm512_and_si512(halves, _mm512_set1_epi32(0x7fff0000)),
                                    _mm512_slli_epi32(halves, 16));
    }
    for (; form == INPUTS_F32 && k + EP_AVX512_FLOATS <= k_count; k += EP_AVX512_FLOATS) {
        greatest = _mm512_max_epu32(
            greatest, _mm512_and_si512(_mm512_loadu_si512(x + 4 * (size_t)k), sign_off));
    }
    for (; k < k_count; k += EP_AVX512_FLOATS) {
        const uint32_t count = k_count - k < EP_AVX512_FLOATS ? k_count - k : EP_AVX512_FLOATS;
        const __m512i bits = _mm512_castps_si512(ep_avx512_widen(batch, row, k, count));
        greatest = _mm512_max_epu32(greatest, _mm512_and_si512(bits, sign_off));
    }
    return ep_ffn_int8_scale((uint32_t)_mm512_reduce_max_epu32(greatest));
}

/*
 * Division takes longer than all else here. low and high are a little less and a little more than 1
 * / scale, beyond all rounding errors; so x / scale, rounded, lies between the two products, and
 * where these have one nearest integer it is that of the quotient.
 */
typedef struct {
    float scale;
    float low; /* 0: too near to the ends of what floats hold */
    float high;
} divisor;

INLINE divisor divisor_of(float scale)
{
    const bool is_usual = scale > 0x1p-100f;
    const float inverse = is_usual ? 1.0f / scale : 0.0f;
    return (divisor){
        .scale = scale, .low = inverse * (1.0f - 0x1p-22f), .high = inverse * (1.0f + 0x1p-22f)};
}

/* 16 inputs from k on, zeros behind k_count. Forms other than any: there are 16. */
INLINE __m512 inputs16(const inputs form, const ep_ffn_batch *batch, const ep_ffn_row *row,
                       uint32_t k, uint32_t k_count)
{
    const uint8_t *x = row->x;
    if (form == INPUTS_BF16) {
        const __m256i halves =
            _mm256_loadu_si256((const __m256i *)(const void *)(x + 2 * (size_t)k));
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
    }
    if (form == INPUTS_F32) {
        return _mm512_loadu_ps(x + 4 * (size_t)k);
    }
    const uint32_t left = k < k_count ? k_count - k : 0;
    return left == 0
               ? _mm512_setzero_ps()
               : ep_avx512_widen(batch, row, k, left < EP_AVX512_FLOATS ? left : EP_AVX512_FLOATS);
}

/* ep_ffn_int8_round of inputs k..k + 63, plus 128. */
INLINE __m512i round64(const inputs form, const ep_ffn_batch *batch, const ep_ffn_row *row,
                       uint32_t k, uint32_t k_count, const divisor *d)
{
    const __m512i plus = _mm512_set1_epi8((char)0x80);
    if (!(d->scale > 0.0f)) {
        return plus;
    }
    __m512 x[4];
    __m512i q[4];
    __mmask16 unsure = d->low > 0.0f ? 0 : 0xffff;
#pragma GCC unroll 4
    for (uint32_t i = 0; i < 4; i++) {
        x[i] = inputs16(form, batch, row, k + 16 * i, k_count);
        q[i] = _mm512_cvtps_epi32(_mm512_mul_ps(x[i], _mm512_set1_ps(d->low)));
        const __m512i above = _mm512_cvtps_epi32(_mm512_mul_ps(x[i], _mm512_set1_ps(d->high)));
        unsure |= _mm512_cmpneq_epi32_mask(q[i], above);
    }
    if (__builtin_expect(unsure != 0, 0)) {
#pragma GCC unroll 4
        for (uint32_t i = 0; i < 4; i++) {
            q[i] = _mm512_cvtps_epi32(_mm512_div_ps(x[i], _mm512_set1_ps(d->scale)));
        }
    }
    __m512i codes =
        _mm512_packs_epi16(_mm512_packs_epi32(q[0], q[1]), _mm512_packs_epi32(q[2], q[3]));
    codes = _mm512_max_epi8(codes, _mm512_set1_epi8(-127));
    /* Packing went by lanes of 128 bits: quad 4 j + l is word 4 l + j. */
    const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    return _mm512_xor_si512(_mm512_permutexvar_epi32(order, codes), plus);
}

/* A chunk of rows; form is a constant wherever this is inlined. */
INLINE void round_chunk(const inputs form, const ep_ffn_batch *batch, uint32_t first_row,
                        uint32_t rows, uint32_t k_count, int8_t *a, float *scales)
{
    const ep_ffn_row *from = batch->rows + first_row;
    divisor by[EP_FFN_CHUNK_ROWS];
    __m512i quads[EP_FFN_CHUNK_ROWS];
    for (uint32_t r = 0; r < rows; r++) {
        scales[r] = row_scale(form, batch, &from[r],
                              &from[first_row + r + 1 < batch->rows_count ? r + 1 : r], k_count);
        by[r] = divisor_of(scales[r]);
    }
    for (uint32_t k = 0; k < k_count; k += ROUNDED) {
        const uint32_t left = k_count - k;
        for (uint32_t r = 0; r < rows; r++) {
            quads[r] = left >= ROUNDED ? round64(form, batch, &from[r], k, k_count, &by[r])
                                       : round64(INPUTS_ANY, batch, &from[r], k, k_count, &by[r]);
        }
        float *to = (float *)(void *)(a + (size_t)k * rows);
        EP_AVX512_FOR_ROWS(rows, ep_avx512_interleave, quads,
                           ep_ffn_quads(left < ROUNDED ? left : ROUNDED), to)
    }
}

void ep_ffn_avx512vnni_int8_rows(const ep_ffn_batch *batch, uint32_t first_row, uint32_t rows,
                                 uint32_t k_count, int8_t *a, float *scales)
{
    const inputs form = inputs_of(batch);
    if (form == INPUTS_BF16) {
        round_chunk(INPUTS_BF16, batch, first_row, rows, k_count, a, scales);
    } else if (form == INPUTS_F32) {
        round_chunk(INPUTS_F32, batch, first_row, rows, k_count, a, scales);
    } else {
        round_chunk(INPUTS_ANY, batch, first_row, rows, k_count, a, scales);
    }
}
