/* SPDX-License-Identifier: Apache-2.0 */
/* Compares lib/backends/ascend/acl_symbols.h with the vendor's headers: prototypes when it is
 * compiled, values when it runs. */
#include <stdio.h>

#include "acl/acl_rt.h"
#include "backends/ascend/acl_symbols.h"

#define SAME_TYPE(name, result, parameters, need, release)                                         \
    _Static_assert(__builtin_types_compatible_p(__typeof__(name), result parameters), #name);
EP_ACL_RUNTIME_SYMBOLS(SAME_TYPE)

_Static_assert(__builtin_types_compatible_p(aclError, ep_acl_code), "aclError");
_Static_assert(__builtin_types_compatible_p(aclrtStream, ep_acl_stream), "aclrtStream");
_Static_assert(__builtin_types_compatible_p(aclrtEvent, ep_acl_event), "aclrtEvent");
_Static_assert(__builtin_types_compatible_p(aclDataType, ep_acl_data_type), "aclDataType");
_Static_assert(__builtin_types_compatible_p(aclFormat, ep_acl_format), "aclFormat");

static int differs(const char *name, long long theirs, long long ours)
{
    if (theirs != ours) {
        printf("%s is %lld, here %lld\n", name, theirs, ours);
    }
    return theirs != ours;
}

int main(void)
{
    int differences = 0;
    int compared = 0;
#define SAME_VALUE(ours, theirs, value)                                                            \
    compared++, differences += differs(#theirs, (long long)(theirs), ours);
#define SAME_CODE(name, code, err, text) compared++, differences += differs(#name, name, code);
    EP_ACL_VALUE_MAP(SAME_VALUE)
    EP_ACL_CODE_MAP(SAME_CODE)
    printf("%d values compared\n", compared);
    return differences != 0;
}
