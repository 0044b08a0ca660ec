/* Looking up entry points by name, CUDA version and default-stream flavour. */
#include <string.h>
#include "sim.h"
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

static void *as_object(void (*f)(void))
{
	void *p;
	memcpy(&p, &f, sizeof p);
	return p;
}

CUresult cuGetProcAddress_v2(const char *symbol, void **pfn, int cudaVersion, cuuint64_t flags,
			     CUdriverProcAddressQueryResult *symbolStatus)
{
	enum sim_proc_status status;
	SIM_CALL_UNINIT(cuGetProcAddress_v2);
	if (!symbol || !*symbol || !pfn || flags > 3)
		return CUDA_ERROR_INVALID_VALUE;
	*pfn = as_object(sim_proc_find(symbol, (unsigned)cudaVersion, (unsigned)flags, &status));
	if (symbolStatus)
		*symbolStatus = status == SIM_PROC_FOUND ? CU_GET_PROC_ADDRESS_SUCCESS :
				status == SIM_PROC_NO_SYMBOL ?
					CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND :
					CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT;
	return CUDA_SUCCESS;
}

CUresult cuGetProcAddress(const char *symbol, void **pfn, int cudaVersion, cuuint64_t flags)
{
	enum sim_proc_status status;
	SIM_CALL_UNINIT(cuGetProcAddress);
	if (!symbol || !*symbol || !pfn || flags > 3)
		return CUDA_ERROR_INVALID_VALUE;
	void (*f)(void) = sim_proc_find(symbol, (unsigned)cudaVersion, (unsigned)flags, &status);
	if (!f)
		return CUDA_ERROR_NOT_FOUND;
	*pfn = as_object(f);
	return CUDA_SUCCESS;
}
