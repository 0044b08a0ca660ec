/* A definition of every function that the real library exports, for those that no other file
 * defines: the linker prefers a strong definition to these weak ones. They say
 * NVML_ERROR_NOT_SUPPORTED, which every NVML program must expect of any query, and name
 * themselves in the trace. */
#include "../state.h"
enum { NOT_SUPPORTED = 3 };
#define NVML(name)                                                                                 \
	__attribute__((weak, visibility("default"))) int name(void);                               \
	int name(void)                                                                             \
	{                                                                                          \
		SIM_TRACE("%s: not implemented", #name);                                          \
		return NOT_SUPPORTED;                                                              \
	}
#include "exports.def"
