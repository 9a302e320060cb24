/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/store_trace.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/random.h"

#define TOKENS_MAX 64 /* of a sequence in a step */
#define SEQUENCES_MAX 256

typedef struct maker {
    const trace_setting *s;
    uint64_t state;
    float *log_popularity;  /* [domain][layer][expert] */
    float *type_popularity; /* [type][layer][expert] */
    uint32_t *types;        /* [sequence][token] of the step */
    uint32_t *kept;         /* [sequence][layer][slot] experts of the last token */
    uint32_t *domain;       /* [sequence] */
    uint32_t *step_of;      /* [sequence] in its request */
} maker;

static float uniform(maker *m)
{
    return ((float)(ep_splitmix64(&m->state) >> 40) + 0.5f) / 16777216.0f;
}

static float normal(maker *m)
{
    return sqrtf(-2.0f * logf(uniform(m))) * cosf(6.2831853f * uniform(m));
}

static float *popularity(maker *m, uint32_t domain, uint32_t layer)
{
    return m->log_popularity + ((size_t)domain * m->s->layers + layer) * m->s->experts;
}

static void drift(maker *m)
{
    const size_t count = (size_t)m->s->domains * m->s->layers * m->s->experts;
    const float keep = sqrtf(1.0f - m->s->drift * m->s->drift);
    for (size_t i = 0; i < count; i++) {
        m->log_popularity[i] = keep * m->log_popularity[i] + m->s->drift * m->s->sigma * normal(m);
    }
}

/* The kinds of a step's tokens: the r-th of a domain is 1 / (1 + r) as frequent as its first. */
static void draw_types(maker *m, uint32_t sequence, uint32_t tokens)
{
    const uint32_t types = m->s->types;
    for (uint32_t t = 0; types > 0 && t < tokens; t++) {
        const float rank = expf(uniform(m) * logf((float)types + 1.0f)) - 1.0f;
        const uint32_t r = (uint32_t)rank < types ? (uint32_t)rank : types - 1;
        m->types[sequence * TOKENS_MAX + t] = (r * 7 + m->domain[sequence] * 5) % types;
    }
}

/* One token: kept slots first, the others by Gumbel top-k over those left. */
static void draw_token(maker *m, uint32_t sequence, uint32_t token, uint32_t layer, bool is_first,
                       uint32_t *used)
{
    const size_t type_at =
        ((size_t)m->types[sequence * TOKENS_MAX + token] * m->s->layers + layer) * m->s->experts;
    const float *of_type = m->s->types > 0 ? m->type_popularity + type_at : NULL;
    const uint32_t top_k = m->s->top_k;
    uint32_t *kept = m->kept + ((size_t)sequence * m->s->layers + layer) * top_k;
    const float *log_p = popularity(m, m->domain[sequence], layer);
    uint32_t chosen[64];
    float key[64];
    uint32_t keeps = 0;
    uint8_t taken[1024] = {0};
    for (uint32_t k = 0; k < top_k && !is_first; k++) {
        if (uniform(m) < m->s->reuse) {
            chosen[keeps++] = kept[k];
            taken[kept[k]] = 1;
        }
    }
    uint32_t count = keeps;
    for (uint32_t e = 0; e < m->s->experts; e++) {
        if (taken[e]) {
            continue;
        }
        const float value = log_p[e] + (of_type != NULL ? of_type[e] : 0) - logf(-logf(uniform(m)));
        uint32_t at = count < top_k ? count++ : top_k;
        if (at == top_k && (keeps == top_k || value <= key[top_k - 1])) {
            continue;
        }
        for (at = at == top_k ? top_k - 1 : at; at > keeps && key[at - 1] < value; at--) {
            chosen[at] = chosen[at - 1];
            key[at] = key[at - 1];
        }
        chosen[at] = e;
        key[at] = value;
    }
    for (uint32_t k = 0; k < top_k; k++) {
        kept[k] = chosen[k];
        used[chosen[k]]++;
    }
}

/* A sequence's next request begins; the first sequence's requests are the clock of domains and
 * drift. */
static void begin_request(maker *m, uint32_t sequence, uint64_t *requests)
{
    const trace_setting *s = m->s;
    if (sequence == 0) {
        if (s->drift > 0) {
            drift(m);
        }
        if (s->stay_requests != 0 && *requests % s->stay_requests == 0) {
            const uint32_t domain =
                (m->domain[0] + 1 + (uint32_t)(ep_splitmix64(&m->state) % (s->domains - 1))) %
                s->domains;
            for (uint32_t i = 0; i < s->sequences; i++) {
                m->domain[i] = domain;
            }
        }
        ++*requests;
    }
    if (s->stay_requests == 0) {
        m->domain[sequence] = (uint32_t)(ep_splitmix64(&m->state) % s->domains);
    }
}

static void make_step(maker *m, store_trace *trace, uint64_t *requests)
{
    const trace_setting *s = m->s;
    uint32_t used[1024];
    uint32_t tokens[SEQUENCES_MAX];
    for (uint32_t q = 0; q < s->sequences; q++) {
        if (m->step_of[q] == 0) {
            begin_request(m, q, requests);
        }
        tokens[q] = m->step_of[q] == 0 ? s->prefill : 1;
        draw_types(m, q, tokens[q]);
    }
    for (uint32_t l = 0; l < s->layers; l++) {
        memset(used, 0, sizeof(used));
        for (uint32_t q = 0; q < s->sequences; q++) {
            for (uint32_t t = 0; t < tokens[q]; t++) {
                draw_token(m, q, t, l, m->step_of[q] == 0 && t == 0, used);
            }
        }
        trace_visit *visit = &trace->visits[trace->visits_count++];
        *visit = (trace_visit){.layer = l, .first = trace->uses_count};
        for (uint32_t e = 0; e < s->experts; e++) {
            if (used[e]) {
                trace->rows[trace->uses_count] = used[e];
                trace->experts[trace->uses_count++] = e;
            }
        }
        visit->count = trace->uses_count - visit->first;
    }
    for (uint32_t q = 0; q < s->sequences; q++) {
        m->step_of[q] = (m->step_of[q] + 1) % s->request_steps;
    }
}

static float between(maker *m, float low, float high)
{
    return low + (high - low) * uniform(m);
}

static uint32_t one_of(maker *m, const uint32_t *values, uint32_t count)
{
    return values[ep_splitmix64(&m->state) % count];
}

trace_setting store_trace_draw(uint64_t seed, bool has_types)
{
    static const uint32_t experts[] = {32, 64, 128, 256}, top_k[] = {2, 4, 6, 8},
                          sequences[] = {1, 1, 2, 4, 8};
    static const uint32_t prefill[] = {1, 1, 16, 64}, stay[] = {0, 0, 3, 8};
    maker m = {.state = seed};
    trace_setting s = {.name = "drawn"};
    s.layers = 8 + (uint32_t)(ep_splitmix64(&m.state) % 17);
    s.experts = one_of(&m, experts, 4);
    s.top_k = s.experts <= 64 ? one_of(&m, top_k, 3) : one_of(&m, top_k + 1, 3);
    s.sequences = one_of(&m, sequences, 5);
    s.domains = 3 + (uint32_t)(ep_splitmix64(&m.state) % 4);
    s.sigma = has_types ? between(&m, 0.5f, 1.1f) : between(&m, 0.6f, 1.5f);
    s.reuse = has_types ? between(&m, 0.05f, 0.25f) : between(&m, 0.2f, 0.5f);
    s.drift = between(&m, 0.0f, 0.2f);
    s.request_steps = 30 + (uint32_t)(ep_splitmix64(&m.state) % 170);
    s.prefill = one_of(&m, prefill, 4);
    s.stay_requests = one_of(&m, stay, 4);
    s.steps = 14000 / s.layers;
    s.types = has_types ? 16 + (uint32_t)(ep_splitmix64(&m.state) % 113) : 0;
    s.type_sigma = has_types ? between(&m, 0.8f, 1.6f) : 0;
    return s;
}

store_trace *store_trace_make(const trace_setting *s, uint64_t seed)
{
    store_trace *trace = calloc(1, sizeof(*trace));
    const size_t cells = (size_t)s->domains * s->layers * s->experts;
    maker m = {.s = s, .state = seed};
    uint64_t requests = 0;
    EP_ASSERT(s->experts <= 1024 && s->top_k <= 64 && s->sequences <= SEQUENCES_MAX &&
              s->prefill <= TOKENS_MAX && s->domains > 1);
    m.log_popularity = malloc(cells * sizeof(float));
    const size_t type_cells = (size_t)s->types * s->layers * s->experts;
    m.type_popularity = malloc((type_cells + 1) * sizeof(float));
    m.types = calloc((size_t)s->sequences * TOKENS_MAX, sizeof(uint32_t));
    m.kept = calloc((size_t)s->sequences * s->layers * s->top_k, sizeof(uint32_t));
    m.domain = calloc(s->sequences, sizeof(uint32_t));
    m.step_of = calloc(s->sequences, sizeof(uint32_t));
    trace->setting = *s;
    trace->visits = malloc((size_t)s->steps * s->layers * sizeof(*trace->visits));
    trace->experts = malloc((size_t)s->steps * s->layers * s->experts * sizeof(uint32_t));
    trace->rows = malloc((size_t)s->steps * s->layers * s->experts * sizeof(uint32_t));
    EP_ASSERT(trace->rows != NULL && m.log_popularity != NULL && m.type_popularity != NULL &&
              m.types != NULL && m.kept != NULL && trace->visits != NULL && trace->experts != NULL);
    for (size_t i = 0; i < cells; i++) {
        m.log_popularity[i] = s->sigma * normal(&m);
    }
    for (size_t i = 0; i < type_cells; i++) {
        m.type_popularity[i] = s->type_sigma * normal(&m);
    }
    /* requests do not all begin at once */
    for (uint32_t q = 0; q < s->sequences && s->stay_requests == 0; q++) {
        m.step_of[q] = q % s->request_steps;
        m.domain[q] = q % s->domains;
        for (uint32_t l = 0; l < s->layers; l++) {
            uint32_t used[1024] = {0};
            draw_token(&m, q, 0, l, true, used);
        }
    }
    for (uint32_t step = 0; step < s->steps; step++) {
        make_step(&m, trace, &requests);
    }
    free(m.log_popularity);
    free(m.type_popularity);
    free(m.types);
    free(m.kept);
    free(m.domain);
    free(m.step_of);
    return trace;
}

void store_trace_free(store_trace *trace)
{
    free(trace->visits);
    free(trace->experts);
    free(trace->rows);
    free(trace);
}
