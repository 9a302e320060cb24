/* SPDX-License-Identifier: Apache-2.0 */
/* Compares the operators' prototypes in lib/backends/ascend/acl_symbols.h with the restated ones,
 * when it is compiled. */
#include <stdbool.h>
#include <stdint.h>

#include "acl_operator_prototypes.h"
#include "backends/ascend/acl_symbols.h"

typedef struct aclTensor aclTensor;
typedef struct aclTensorList aclTensorList;
typedef struct aclIntArray aclIntArray;
typedef struct aclOpExecutor aclOpExecutor;
typedef int32_t aclnnStatus;
typedef void *aclrtStream;
typedef int aclDataType; /* enums with negative members */
typedef int aclFormat;

#define THEIRS(name, result, parameters) typedef result their_##name parameters;
#define LIST(header, list) list(THEIRS)
ACL_OPERATOR_HEADERS(LIST)

#define SAME_TYPE(name, result, parameters, need, release)                                         \
    _Static_assert(__builtin_types_compatible_p(their_##name, result parameters), #name);
EP_ACL_META_SYMBOLS(SAME_TYPE)
EP_ACL_NN_SYMBOLS(SAME_TYPE)
EP_ACL_TRANSFORMER_SYMBOLS(SAME_TYPE)
