/* SPDX-License-Identifier: Apache-2.0 */
#include "base/path_count.h"

uint64_t ep_path_bytes[EP_PATH_STAGES];
