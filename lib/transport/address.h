/* SPDX-License-Identifier: Apache-2.0 */
/* What an address tells without looking it up. Threads: pure. */
#ifndef EP_TRANSPORT_ADDRESS_H
#define EP_TRANSPORT_ADDRESS_H

#include <stdbool.h>

/*
 * Whether a "scheme://host:port" or "host:port" text names this host only. Unresolved names are not loopback,
 * except "localhost"; lanes that cannot leave the host are.
 */
bool ep_address_is_loopback(const char *address);

#endif
