/* Looking up entry points by name, CUDA version and default-stream flavour. Knows no device, so the
 * null driver has it too. */
#include <string.h>
#include "procaddr.h"

void (*sim_proc_find(const char *name, unsigned version, unsigned flags,
		     enum sim_proc_status *status))(void)
{
	const struct sim_proc_row *best = NULL;
	int want = flags & 2 ? 2 : 0;
	*status = SIM_PROC_NO_SYMBOL;
	for (const struct sim_proc_row *r = sim_proc_rows; r->name; r++) {
		if (strcmp(r->name, name))
			continue;
		*status = SIM_PROC_NO_VERSION;
		if (r->min_version <= version && (r->flags < 0 || r->flags == want) &&
		    (!best || r->min_version >= best->min_version))
			best = r;
	}
	if (!best)
		return NULL;
	*status = SIM_PROC_FOUND;
	return best->symbol;
}
