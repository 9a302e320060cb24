/* SPDX-License-Identifier: Apache-2.0 */
/* Backend "reference": one worker thread, plain loops over row-major weights. Other backends are
 * compared with it. */
#ifndef EP_BACKENDS_REFERENCE_REFERENCE_BACKEND_H
#define EP_BACKENDS_REFERENCE_REFERENCE_BACKEND_H

#include "backends/backend.h"

extern const ep_backend_ops ep_backend_reference_ops;

#endif
