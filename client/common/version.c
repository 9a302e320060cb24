/* SPDX-License-Identifier: Apache-2.0 */
/* The version the library was built as; the number comes from the top CMakeLists.txt. */
#include "expertd/client.h"

const char *ep_version(void)
{
    return EP_VERSION_TEXT;
}
