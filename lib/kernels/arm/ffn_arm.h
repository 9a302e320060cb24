/* SPDX-License-Identifier: Apache-2.0 */
/* Kernels for 64-bit Arm. Call them only when cpu_features.h says so: their files alone get the instruction set
 * flags. */
#ifndef EP_KERNELS_ARM_FFN_ARM_H
#define EP_KERNELS_ARM_FFN_ARM_H

#include "kernels/ffn_kernel.h"

extern const ep_ffn_kernel ep_ffn_kernel_neon; /* Armv8.0 */

#endif
