/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Small checkpoints of every name family and weight format, each with its experts as sources: the
 * result that a reader must produce from the files. Values are integers from a seeded generator on
 * a coarse grid. Tensors alternate between two files, so that an expert's matrices lie in both.
 */
#ifndef EP_TESTS_SUPPORT_FORMAT_FIXTURE_H
#define EP_TESTS_SUPPORT_FORMAT_FIXTURE_H

#include "base/error.h"
#include "base/expert_form.h"

#define EP_FORMAT_EXPERTS 4 /* in layer 1, the only MoE layer; layer 0 is dense */
#define EP_FORMAT_LAYER 1

typedef enum ep_format_names {
    EP_FORMAT_N1,      /* model.layers.L.mlp.experts.E.gate_proj.* */
    EP_FORMAT_N1_DEEP, /* the same behind language_model.model. */
    EP_FORMAT_MIXER,   /* backbone.layers.L.mixer.experts.E.up_proj.* */
    EP_FORMAT_N2,      /* block_sparse_moe.experts.E.w1.* */
    EP_FORMAT_N2M,     /* layers.L.experts.E.w1.* */
    EP_FORMAT_N4,      /* layers.L.ffn.experts.E.w1.{weight,scale} */
    EP_FORMAT_N3,      /* [E,2I,H] */
    EP_FORMAT_N3_TRANSPOSED,
    EP_FORMAT_N7,       /* _blocks, _scales, _bias */
    EP_FORMAT_N7_PLAIN, /* transposed, gate and up alternate, _bias */
    EP_FORMAT_N8,
    EP_FORMAT_N9,
    EP_FORMAT_N11,
    EP_FORMAT_BLK,      /* blk.L.ffn_{gate,up,down}_exps.weight, in model.gguf */
    EP_FORMAT_BLK_FUSED /* blk.L.ffn_{gate_up,down}_exps.weight, in two files */
} ep_format_names;

/* The containers in which tools write quantised matrices. */
typedef enum ep_format_container {
    EP_FORMAT_USUAL, /* as the format's first publishers do */
    /* compressed-tensors: words of 4 or 8 bits, zero points packed down the columns */
    EP_FORMAT_PACKED,
    EP_FORMAT_INT8,     /* compressed-tensors: int8, zero points too */
    EP_FORMAT_F8,       /* scales for `group` rows and columns, or one */
    EP_FORMAT_NVFP4,    /* weight_global_scale divides */
    EP_FORMAT_MODELOPT, /* weight_scale_2 multiplies */
    EP_FORMAT_GPTQ,
    EP_FORMAT_AWQ,
    EP_FORMAT_GGUF /* format_gguf.c */
} ep_format_container;

/* The last fields of a case whose tensors are as the format's first publishers write them. */
#define EP_FORMAT_AS_USUAL EP_FORMAT_USUAL, 0, EP_DTYPE_NONE, NULL, NULL, NULL, EP_WEIGHTS_NONE

typedef struct ep_format_case {
    const char *name;
    ep_format_names names;
    ep_weight_format format;
    uint32_t hidden;
    uint32_t inner;
    /* further keys, each with a comma behind; "": none. GGUF: the architecture */
    const char *config;
    ep_activation activation;
    ep_activation_numbers numbers;
    bool biases;
    bool bf16_scales; /* f8_channel: in bf16, [rows] */
    ep_format_container container;
    uint32_t group;        /* columns (f8: rows too) that share a scale in the file; 0: all */
    ep_dtype scales;       /* in the file */
    const char *quantised; /* quantization_config; NULL: only what is required */
    const char *type;      /* GGUF type of gate and up */
    const char *down_type; /* NULL: the same */
    ep_weight_format down; /* NONE: the same */
} ep_format_case;

/* Every family and every format at least once. */
extern const ep_format_case ep_format_cases[];
extern const size_t ep_format_cases_count;

/* A tensor to be written; dtype is the file format's text for the type. */
typedef struct ep_format_tensor {
    char name[192];
    char dtype[16];
    uint64_t dims[4];
    uint32_t rank;
    uint8_t *data;
    size_t bytes;
} ep_format_tensor;

typedef struct ep_format_model {
    const ep_format_case *form;
    ep_expert_source experts[EP_FORMAT_EXPERTS];
    uint8_t *parts[EP_FORMAT_EXPERTS][9]; /* values, scales, biases of gate, up, down */
    float factors[EP_FORMAT_EXPERTS][3];  /* nvfp4: factors of gate, up, down as in the file */
    /* the file's column for each column of gate and up; NULL: the same */
    uint32_t *up_order[EP_FORMAT_EXPERTS];
    uint32_t *down_order[EP_FORMAT_EXPERTS];
    uint32_t *places[EP_FORMAT_EXPERTS];
    ep_format_tensor *tensors;
    size_t tensors_count;
    size_t tensors_capacity;
} ep_format_model;

ep_format_model *ep_format_model_make(const ep_format_case *form, uint64_t seed);
void ep_format_model_free(ep_format_model *model);
/* Adds an all-zero tensor for the caller to fill; its data is freed with the model. */
ep_format_tensor *ep_format_model_room(ep_format_model *model);
/* Whether the file has zero points beside the codes; a form that can have them may have none. */
bool ep_format_case_has_zeros(const ep_format_case *form);
/* Whether columns are assigned to groups in a permuted order. */
bool ep_format_case_has_order(const ep_format_case *form);
/* Adds a tensor with zero data. element: bytes of an element; dims end at the first 0. */
ep_format_tensor *ep_format_model_add(ep_format_model *model, const char *name, const char *dtype,
                                      size_t element, const uint64_t dims[4]);
/* Adds matrix m of expert e in a container other than EP_FORMAT_USUAL. stem: its name. */
void ep_format_model_contain(ep_format_model *model, const char *stem, uint32_t e, int m);
/* Adds all tensors of a GGUF file. */
void ep_format_gguf_add(ep_format_model *model);
ep_err ep_format_gguf_write(const ep_format_model *model, const char *dir, ep_error *out_error);
/* Returns the format of a matrix: 2 is down. */
static inline ep_weight_format ep_format_case_of(const ep_format_case *form, int matrix)
{
    return matrix == 2 && form->down != EP_WEIGHTS_NONE ? form->down : form->format;
}
/* Finds the tensor whose name ends with end; NULL: none. Tests damage it before it is written. */
ep_format_tensor *ep_format_model_find(ep_format_model *model, const char *end);
/* Writes config.json, two shards and an index, or GGUF files. Leaves out nameless tensors. */
ep_err ep_format_model_write(const ep_format_model *model, const char *dir, ep_error *out_error);

#endif
