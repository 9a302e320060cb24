/* SPDX-License-Identifier: Apache-2.0 */
#include "base/private_file.h"

#include <criterion/criterion.h>

Test(private_file, only_the_owner_or_a_group_that_root_chose)
{
    enum { ROOT = 0, US = 1000 };
    const struct {
        mode_t mode;
        uid_t owner;
        bool is_private;
    } rows[] = {
        {0600, US, true},    {0400, US, true},    {0600, ROOT, true},  {0400, ROOT, true},
        {0440, ROOT, true},  {0640, ROOT, true},  {0440, US, false},   {0640, US, false},
        {0460, ROOT, false}, {0660, ROOT, false}, {0620, ROOT, false}, {0450, ROOT, false},
        {0444, ROOT, false}, {0404, ROOT, false}, {0601, US, false},   {0602, US, false},
        {04600, US, true},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        struct stat status = {.st_mode = S_IFREG | rows[i].mode, .st_uid = rows[i].owner};
        cr_expect_eq(ep_file_is_private(&status), rows[i].is_private, "mode %04o owner %u",
                     (unsigned)rows[i].mode, rows[i].owner);
    }
}
