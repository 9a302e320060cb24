/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the vendor's headers say of the operators and their objects, restated by hand from the
 * documents named at each list, in the vendor's names; the product takes nothing from here.
 * X(symbol, result, parameters)
 */
#ifndef EP_TESTS_UNIT_BACKENDS_ACL_OPERATOR_PROTOTYPES_H
#define EP_TESTS_UNIT_BACKENDS_ACL_OPERATOR_PROTOTYPES_H

/* include/nnopbase/aclnn/acl_meta.h of opbase, 2026-07 */
#define ACL_META_H(X)                                                                              \
    X(aclCreateTensor, aclTensor *,                                                                \
      (const int64_t *viewDims, uint64_t viewDimsNum, aclDataType dataType, const int64_t *stride, \
       int64_t offset, aclFormat format, const int64_t *storageDims, uint64_t storageDimsNum,      \
       void *tensorData))                                                                          \
    X(aclDestroyTensor, aclnnStatus, (const aclTensor *tensor))                                    \
    X(aclCreateTensorList, aclTensorList *, (const aclTensor *const *value, uint64_t size))        \
    X(aclDestroyTensorList, aclnnStatus, (const aclTensorList *array))                             \
    X(aclDestroyAclOpExecutor, aclnnStatus, (aclOpExecutor * executor))

/* activation/swi_glu/docs/aclnnSwiGlu.md of ops-nn, 2026-08 */
#define ACLNN_SWI_GLU_H(X)                                                                         \
    X(aclnnSwiGluGetWorkspaceSize, aclnnStatus,                                                    \
      (const aclTensor *x, int64_t dim, const aclTensor *out, uint64_t *workspaceSize,             \
       aclOpExecutor **executor))                                                                  \
    X(aclnnSwiGlu, aclnnStatus,                                                                    \
      (void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, aclrtStream stream))

/* quant/dynamic_quant/docs/aclnnDynamicQuant.md of ops-nn, 2026-08 */
#define ACLNN_DYNAMIC_QUANT_H(X)                                                                   \
    X(aclnnDynamicQuantGetWorkspaceSize, aclnnStatus,                                              \
      (const aclTensor *x, const aclTensor *smoothScalesOptional, const aclTensor *yOut,           \
       const aclTensor *scaleOut, uint64_t *workspaceSize, aclOpExecutor **executor))              \
    X(aclnnDynamicQuant, aclnnStatus,                                                              \
      (void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, aclrtStream stream))

/* activation/clipped_swiglu/docs/aclnnClippedSwiglu.md of ops-nn, 2026-08 */
#define ACLNN_CLIPPED_SWIGLU_H(X)                                                                  \
    X(aclnnClippedSwigluGetWorkspaceSize, aclnnStatus,                                             \
      (const aclTensor *x, const aclTensor *groupIndexOptional, int64_t dim, double alpha,         \
       double limit, double bias, bool interleaved, const aclTensor *out, uint64_t *workspaceSize, \
       aclOpExecutor **executor))                                                                  \
    X(aclnnClippedSwiglu, aclnnStatus,                                                             \
      (void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, aclrtStream stream))

/* activation/ge_glu_v2/docs/aclnnGeGluV3.md of ops-nn, 2026-08 */
#define ACLNN_GEGLU_H(X)                                                                           \
    X(aclnnGeGluV3GetWorkspaceSize, aclnnStatus,                                                   \
      (const aclTensor *self, int64_t dim, int64_t approximate, bool activateLeft, aclTensor *out, \
       aclTensor *outGelu, uint64_t *workspaceSize, aclOpExecutor **executor))                     \
    X(aclnnGeGluV3, aclnnStatus,                                                                   \
      (void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, aclrtStream stream))

/* gmm/grouped_matmul/docs/aclnnGroupedMatmulV5.md of ops-transformer 8.5 */
#define ACLNN_GROUPED_MATMUL_V5_H(X)                                                               \
    X(aclnnGroupedMatmulV5GetWorkspaceSize, aclnnStatus,                                           \
      (const aclTensorList *x, const aclTensorList *weight, const aclTensorList *biasOptional,     \
       const aclTensorList *scaleOptional, const aclTensorList *offsetOptional,                    \
       const aclTensorList *antiquantScaleOptional, const aclTensorList *antiquantOffsetOptional,  \
       const aclTensorList *perTokenScaleOptional, const aclTensor *groupListOptional,             \
       const aclTensorList *activationInputOptional,                                               \
       const aclTensorList *activationQuantScaleOptional,                                          \
       const aclTensorList *activationQuantOffsetOptional, int64_t splitItem, int64_t groupType,   \
       int64_t groupListType, int64_t actType, aclIntArray *tuningConfigOptional,                  \
       aclTensorList *out, aclTensorList *activationFeatureOutOptional,                            \
       aclTensorList *dynQuantScaleOutOptional, uint64_t *workspaceSize,                           \
       aclOpExecutor **executor))                                                                  \
    X(aclnnGroupedMatmulV5, aclnnStatus,                                                           \
      (void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, aclrtStream stream))

/* gmm/grouped_matmul/docs/aclnnGroupedMatmulV4.md of ops-transformer 8.5 */
#define ACLNN_GROUPED_MATMUL_V4_H(X)                                                               \
    X(aclnnGroupedMatmulV4GetWorkspaceSize, aclnnStatus,                                           \
      (const aclTensorList *x, const aclTensorList *weight, const aclTensorList *biasOptional,     \
       const aclTensorList *scaleOptional, const aclTensorList *offsetOptional,                    \
       const aclTensorList *antiquantScaleOptional, const aclTensorList *antiquantOffsetOptional,  \
       const aclTensorList *perTokenScaleOptional, const aclTensor *groupListOptional,             \
       const aclTensorList *activationInputOptional,                                               \
       const aclTensorList *activationQuantScaleOptional,                                          \
       const aclTensorList *activationQuantOffsetOptional, int64_t splitItem, int64_t groupType,   \
       int64_t groupListType, int64_t actType, aclTensorList *out,                                 \
       aclTensorList *activationFeatureOutOptional, aclTensorList *dynQuantScaleOutOptional,       \
       uint64_t *workspaceSize, aclOpExecutor **executor))                                         \
    X(aclnnGroupedMatmulV4, aclnnStatus,                                                           \
      (void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, aclrtStream stream))

/* gmm/grouped_matmul_swiglu_quant/docs/aclnnGroupedMatmulSwigluQuant.md of ops-transformer 8.5 */
#define ACLNN_GROUPED_MATMUL_SWIGLU_QUANT_H(X)                                                     \
    X(aclnnGroupedMatmulSwigluQuantGetWorkspaceSize, aclnnStatus,                                  \
      (const aclTensor *x, const aclTensor *weight, const aclTensor *bias,                         \
       const aclTensor *offset, const aclTensor *weightScale, const aclTensor *xScale,             \
       const aclTensor *groupList, aclTensor *output, aclTensor *outputScale,                      \
       aclTensor *outputOffset, uint64_t *workspaceSize, aclOpExecutor **executor))                \
    X(aclnnGroupedMatmulSwigluQuant, aclnnStatus,                                                  \
      (void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, aclrtStream stream))

/* header, its list */
#define ACL_OPERATOR_HEADERS(H)                                                                    \
    H("aclnn/acl_meta.h", ACL_META_H)                                                              \
    H("aclnnop/aclnn_swi_glu.h", ACLNN_SWI_GLU_H)                                                  \
    H("aclnnop/aclnn_dynamic_quant.h", ACLNN_DYNAMIC_QUANT_H)                                      \
    H("aclnnop/aclnn_clipped_swiglu.h", ACLNN_CLIPPED_SWIGLU_H)                                    \
    H("aclnnop/aclnn_geglu.h", ACLNN_GEGLU_H)                                                      \
    H("aclnnop/aclnn_grouped_matmul_v5.h", ACLNN_GROUPED_MATMUL_V5_H)                              \
    H("aclnnop/aclnn_grouped_matmul_v4.h", ACLNN_GROUPED_MATMUL_V4_H)                              \
    H("aclnnop/aclnn_grouped_matmul_swiglu_quant.h", ACLNN_GROUPED_MATMUL_SWIGLU_QUANT_H)

#endif
