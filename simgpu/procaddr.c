/* cuGetProcAddress. */
#include <string.h>
#include "sim.h"
#include "procaddr.h"

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
	if (!symbol || !pfn || flags > 3)
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
	if (!symbol || !pfn || flags > 3)
		return CUDA_ERROR_INVALID_VALUE;
	void (*f)(void) = sim_proc_find(symbol, (unsigned)cudaVersion, (unsigned)flags, &status);
	if (!f)
		return CUDA_ERROR_NOT_FOUND;
	*pfn = as_object(f);
	return CUDA_SUCCESS;
}
