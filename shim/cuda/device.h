/* Which devices the tenant sees: the slice's, as far as the user's CUDA_VISIBLE_DEVICES selects
 * them, in that order. Matched by UUID. */
#ifndef TRANCHE_DEVICE_H
#define TRANCHE_DEVICE_H
#include <stddef.h>
#include <stdint.h>
#include "real.h"

/* Writes the UUIDs, comma separated, that `user` (the value of CUDA_VISIBLE_DEVICES, NULL: unset)
 * selects among the slice's devices: by index, UUID or unique UUID prefix; like the driver it ends
 * at the first entry that names nothing. */
void tr_visible_uuids(const char *user, char *out, size_t size);

/* Asks the driver which devices there are, after its cuInit succeeded. */
void tr_devices_init(void);

/* The driver's handle of a slice device (-1: not visible), and of the tenant's n-th device. */
CUdevice tr_device_handle(int index);
CUdevice tr_visible_handle(int ordinal);

/* The limit in force now, bytes; UINT64_MAX when the device's memory is only counted. */
uint64_t tr_memory_limit(int i);
#endif
