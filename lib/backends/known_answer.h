/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The known-answer run: computes a few rows with fixed pseudo-random experts through a backend's
 * own path, and hashes the results. Some rows and weights make denormals, halfway cases, overflow
 * and NaN with payload.
 *
 * Its digest makes the numerics ids of unlike hardware differ, whatever their names say. A node
 * that rounds or flushes differently gets an id of its own, and its rows are never mixed with
 * others.
 */
#ifndef EP_BACKENDS_KNOWN_ANSWER_H
#define EP_BACKENDS_KNOWN_ANSWER_H

#include "backends/backend.h"

typedef struct ep_known_answer {
    uint32_t digests[EP_WEIGHTS_COUNT]; /* one per format, each covering all activations */
} ep_known_answer;

/* Loads experts, runs them and unloads them on an open backend that computes with numerics; blocks.
 * out_answers[true] is for experts of wide_inputs. Errors: those of loading and running. */
ep_err ep_known_answer_run(ep_backend *backend, ep_numerics numerics,
                           ep_known_answer out_answers[2], ep_error *out_error);

#define EP_KNOWN_ANSWER_INNER 80 /* I */

/* Runs one expert, with I up to EP_KNOWN_ANSWER_INNER, and adds to *digest, which starts as 0; for
 * a backend that does not support all of them. */
ep_err ep_known_answer_run_expert(ep_backend *backend, ep_weight_format format,
                                  ep_activation activation, bool has_biases, uint32_t inner,
                                  uint32_t *digest, ep_error *out_error);

/*
 * Makes an id: "portable/bf16/rne/5f0c9a12". family: the one that weights of this format are
 * computed with. The digest covers this format and the formats in others (bits 1 << format).
 * Errors: UNIMPLEMENTED.
 */
ep_err ep_known_answer_id(const ep_known_answer *answer, const char *family,
                          ep_weight_format format, uint32_t others,
                          char out_id[EP_NUMERICS_ID_BYTES]);

#endif
