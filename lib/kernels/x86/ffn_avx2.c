/* SPDX-License-Identifier: Apache-2.0 */
/* AVX2 + FMA + F16C kernel: 16 registers hold tiles of up to 6 rows x 16 outputs. */
#include "kernels/ffn_activation.h"
#include "kernels/x86/ffn_vector_avx2.h"
#include "kernels/x86/ffn_portable.h"
#include "kernels/x86/ffn_near_blocks.h"
#include "kernels/x86/ffn_x86.h"

TILES(tiles_bf16, EP_DTYPE_BF16, 1)
TILES(tiles_f16, EP_DTYPE_F16, 1)
TILES(tiles_f32, EP_DTYPE_F32, 1)

static void avx2_panel(ep_dtype dtype, const float *a, uint32_t rows, const uint8_t *panel,
                       uint32_t k_count, const uint8_t *next, float *c)
{
    (void)next;
    const tile_func *tiles = dtype == EP_DTYPE_BF16  ? tiles_bf16
                             : dtype == EP_DTYPE_F16 ? tiles_f16
                                                     : tiles_f32;
    near_blocks(tiles, line_bytes(dtype), EP_FFN_K_BLOCK, a, rows, panel, k_count, c);
}

const ep_ffn_kernel ep_ffn_kernel_avx2 = {
    .name = "avx2",
    .panel = avx2_panel,
    .group_panel = ep_ffn_avx2_group_panel,
    .int8_rows = ep_ffn_avx2_int8_rows,
    .int8_panel = ep_ffn_avx2_int8_panel,
    .activate = ep_act_rows,
    .exp16 = ep_act_exp16,
};
