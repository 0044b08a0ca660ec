/* What would change a GPU for its other tenants. The functions ignore their arguments, so one
 * definition without parameters serves them all: on the ABIs of x86-64 and arm64 the caller owns
 * the argument area. This file therefore does not see their prototypes. */
#include "compat.h"
#define _GNU_SOURCE
#include "trace.h"

enum { NO_PERMISSION = 4, FUNCTION_NOT_FOUND = 13 }; /* of nvmlReturn_t */

#define DEFINE(name, why, code)                                                                    \
	int name(void);                                                                            \
	__attribute__((visibility("default"))) int name(void)                                      \
	{                                                                                          \
		TR_TRACE("%s refused: %s", #name, why);                                            \
		return code;                                                                       \
	}
#define TR_HOOK(name)
#define TR_DENY(name, why) DEFINE(name, why, NO_PERMISSION)
#define TR_ABSENT(name, why) DEFINE(name, why, FUNCTION_NOT_FOUND)
#include "hooks.def"
