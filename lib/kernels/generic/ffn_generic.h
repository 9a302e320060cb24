/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_KERNELS_GENERIC_FFN_GENERIC_H
#define EP_KERNELS_GENERIC_FFN_GENERIC_H

#include "kernels/ffn_kernel.h"

extern const ep_ffn_kernel ep_ffn_kernel_generic;

#endif
