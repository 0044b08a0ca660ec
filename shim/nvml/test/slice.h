/* A slice for the tests, laid out as `tranche run` does. Ends the program when that fails. */
#ifndef TRANCHE_NVML_TEST_SLICE_H
#define TRANCHE_NVML_TEST_SLICE_H
#include <stddef.h>
#include <stdint.h>
#include "tranche_abi.h"

/* dir/libnvidia-ml.so.1: our_lib with its two fields filled in, so that its slice directory is dir
 * and its driver driver_lib. Paths are absolute. */
void lay_out(const char *our_lib, const char *driver_lib, const char *dir);

/* An empty ledger and an empty limits page in dir, mapped; magic and version are set. */
struct tr_limits *new_limits(const char *dir);
struct tr_ledger *new_ledger(const char *dir);

/* Makes the process the owner of a slot with that many bytes on device dev. */
void add_member(struct tr_ledger *l, int slot, int dev, unsigned pid, uint64_t starttime,
		uint64_t pidns, uint64_t bytes);
#endif
