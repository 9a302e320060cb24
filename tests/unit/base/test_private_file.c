/* SPDX-License-Identifier: Apache-2.0 */
#include "base/private_file.h"

#include <criterion/criterion.h>

Test(private_file, only_the_owner_or_a_group_that_root_chose)
{
    enum { ROOT = 0, US = 1000 };
    const struct {
        mode_t mode;
        uid_t owner;
        uid_t process;
        bool is_private;
    } rows[] = {
        {0600, US, US, true},     {0400, US, US, true},     {0600, ROOT, ROOT, true},
        {0400, US, ROOT, true},   {0440, ROOT, US, true},   {0640, ROOT, US, true},
        {0440, US, US, false},    {0640, US, US, false},    {0440, ROOT, ROOT, false},
        {0640, ROOT, ROOT, false}, {0440, US, ROOT, false},  {0460, ROOT, US, false},
        {0620, ROOT, US, false},  {0450, ROOT, US, false},  {0444, ROOT, US, false},
        {0404, ROOT, US, false},  {0601, US, US, false},    {0602, US, US, false},
        {04600, US, US, true},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        struct stat status = {.st_mode = S_IFREG | rows[i].mode, .st_uid = rows[i].owner};
        cr_expect_eq(ep_file_is_private(&status, rows[i].process), rows[i].is_private, "mode %04o owner %u process %u",
                     (unsigned)rows[i].mode, rows[i].owner, rows[i].process);
    }
}
