/* The driver's own functions, by exported name: REAL(nvmlInit_v2)(). NULL where the installed
 * driver lacks the function. Filled by the constructor (init.c), before any caller can reach a
 * hook. */
#ifndef TRANCHE_NVML_REAL_H
#define TRANCHE_NVML_REAL_H
#include <stdbool.h>
#include <stddef.h>
#include "nvml_new.h"
#include "slice.h"

/* Functions that the library calls though it does not intercept them. */
#define TR_CALLED(X)                                                                               \
	X(nvmlSystemGetDriverVersion)                                                              \
	X(nvmlSystemGetProcessName)                                                                \
	X(nvmlDeviceGetUUID)                                                                       \
	X(nvmlDeviceGetDeviceHandleFromMigDeviceHandle)

struct tr_real {
#define TR_HOOK(name) __typeof__(&name) name;
#define TR_DENY(name, why)
#define TR_ABSENT(name, why)
#include "hooks.def"
#undef TR_HOOK
#undef TR_DENY
#undef TR_ABSENT
#define X(name) __typeof__(&name) name;
	TR_CALLED(X)
#undef X
};
extern struct tr_real tr_real;
#define REAL(name) (tr_real.name)

#define EXPORT __attribute__((visibility("default")))

/* Is this return address in the driver's library (or in ours, where the driver's function ended in
 * a jump)? The driver calls its own public functions through its PLT, where the loader binds them
 * to ours. Those calls must get what they would without us: nvmlDeviceGetHandleByIndex asks the
 * driver's nvmlDeviceGetHandleByUUID, which may ask nvmlDeviceGetHandleByIndex. init.c */
bool tr_inside(const void *return_address);

/* First line of a hook, with its own arguments: the driver has the function, the caller is not the
 * driver itself, and this process has its slice. */
#define TR_ENTER(name, ...)                                                                        \
	do {                                                                                       \
		if (REAL(name) == NULL)                                                            \
			return NVML_ERROR_FUNCTION_NOT_FOUND;                                      \
		if (tr_inside(__builtin_return_address(0)))                                        \
			return REAL(name)(__VA_ARGS__);                                            \
		if (!tr_slice_open(false))                                                         \
			return NVML_ERROR_NOT_READY;                                               \
	} while (0)

/* Index in the slice of the GPU behind a handle (of a MIG device: of the GPU it is part of).
 * The driver's error if it does not know the handle; NVML_ERROR_INVALID_ARGUMENT for a GPU that
 * the slice does not have. devices.c */
nvmlReturn_t tr_device_index(nvmlDevice_t device, int *index);
/* The driver's handle of a GPU of the slice. devices.c */
nvmlReturn_t tr_device_handle(int index, nvmlDevice_t *device);
/* NVML_SUCCESS once NVML is initialised. devices.c */
nvmlReturn_t tr_initialized(void);

/* Takes a first reading, so that the first question about utilisation has an interval to answer
 * for; and what a forked child must forget. utilization.c */
void tr_utilization_start(void);
void tr_utilization_after_fork(void);
#endif
