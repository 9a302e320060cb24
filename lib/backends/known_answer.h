/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The known-answer run: fixed pseudo-random experts, a few rows, through a backend's own path,
 * hashed; some rows and weights make denormals, halfway cases, overflow and NaN with payload of
 * every kind.
 * Its digest makes numerics ids of unlike hardware differ, whatever their names say: a node that
 * rounds or flushes otherwise serves under an id of its own, and its rows are never mixed with
 * others'.
 */
#ifndef EP_BACKENDS_KNOWN_ANSWER_H
#define EP_BACKENDS_KNOWN_ANSWER_H

#include "backends/backend.h"

typedef struct ep_known_answer {
    uint32_t digests[EP_WEIGHTS_COUNT]; /* by format; each covers all activations */
} ep_known_answer;

/* Loads, runs and unloads on an open backend, which computes with numerics; blocks. [true]: of
 * experts of wide_inputs. Errors: what loading and running bring. */
ep_err ep_known_answer_run(ep_backend *backend, ep_numerics numerics,
                           ep_known_answer out_answers[2], ep_error *out_error);

#define EP_KNOWN_ANSWER_INNER 80 /* I */

/* One expert of it, with up to that I, into *digest, which begins as 0: for a backend that has not
 * all of them. */
ep_err ep_known_answer_run_expert(ep_backend *backend, ep_weight_format format,
                                  ep_activation activation, bool has_biases, uint32_t inner,
                                  uint32_t *digest, ep_error *out_error);

/*
 * "portable/bf16/rne/5f0c9a12". family: what weights of this format are computed with. The digest
 * covers it and the formats in others (bits 1 << format). Errors: UNIMPLEMENTED.
 */
ep_err ep_known_answer_id(const ep_known_answer *answer, const char *family,
                          ep_weight_format format, uint32_t others,
                          char out_id[EP_NUMERICS_ID_BYTES]);

#endif
