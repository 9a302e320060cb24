/* SPDX-License-Identifier: Apache-2.0 */
/* Backend "ascend": Ascend NPUs through CANN. README.md says what it needs of the libraries. */
#ifndef EP_BACKENDS_ASCEND_ASCEND_BACKEND_H
#define EP_BACKENDS_ASCEND_ASCEND_BACKEND_H

#include "backends/backend.h"

extern const ep_backend_ops ep_backend_ascend_ops;

#endif
