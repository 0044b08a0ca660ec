#include "compat.h"
#include "procaddr.h"
#include <stdint.h>
#include <string.h>
#include "real.h"
#include "trace.h"

/* Open addressing, filled once by the constructor. */
#define MAP_SIZE 512
static struct {
	void *real, *hook;
	const char *name;
} map[MAP_SIZE];

static unsigned map_slot(const void *real)
{
	return (unsigned)(((uintptr_t)real >> 4) * 2654435761u) % MAP_SIZE;
}

static void map_add(void *real, void *hook, const char *name)
{
	if (real == NULL)
		return;
	unsigned i = map_slot(real);
	for (; map[i].real != NULL; i = (i + 1) % MAP_SIZE)
		if (map[i].real == real)
			return;
	map[i].real = real;
	map[i].hook = hook;
	map[i].name = name;
}

void tr_procaddr_init(void)
{
#define TR_HOOK(name) map_add((void *)tr_real.name, (void *)&name, #name);
#include "hooks.def"
#undef TR_HOOK
}

static void *hook_of(const char *symbol, void *real)
{
	for (unsigned i = map_slot(real); map[i].real != NULL; i = (i + 1) % MAP_SIZE)
		if (map[i].real == real) {
			TR_TRACE("cuGetProcAddress(%s): our %s", symbol, map[i].name);
			return map[i].hook;
		}
	TR_TRACE("cuGetProcAddress(%s): the driver's", symbol);
	return real;
}

CUresult EXPORT cuGetProcAddress_v2(const char *symbol, void **pfn, int cudaVersion,
				    cuuint64_t flags, CUdriverProcAddressQueryResult *symbolStatus)
{
	if (REAL(cuGetProcAddress_v2) == NULL)
		return CUDA_ERROR_NOT_SUPPORTED;
	CUresult r = REAL(cuGetProcAddress_v2)(symbol, pfn, cudaVersion, flags, symbolStatus);
	if (r == CUDA_SUCCESS && pfn != NULL && *pfn != NULL)
		*pfn = hook_of(symbol, *pfn);
	return r;
}

CUresult EXPORT cuGetProcAddress(const char *symbol, void **pfn, int cudaVersion, cuuint64_t flags)
{
	if (REAL(cuGetProcAddress) == NULL)
		return CUDA_ERROR_NOT_SUPPORTED;
	CUresult r = REAL(cuGetProcAddress)(symbol, pfn, cudaVersion, flags);
	if (r == CUDA_SUCCESS && pfn != NULL && *pfn != NULL)
		*pfn = hook_of(symbol, *pfn);
	return r;
}

/* The driver's private tables pass; which one was asked for is traced, and docs/export-tables.md
 * says what each is known to do. */
CUresult EXPORT cuGetExportTable(const void **ppExportTable, const CUuuid *pExportTableId)
{
	CUresult r = REAL(cuGetExportTable)(ppExportTable, pExportTableId);
	if (tr_trace_on && pExportTableId != NULL) {
		const unsigned char *b = (const unsigned char *)pExportTableId->bytes;
		TR_TRACE("cuGetExportTable(%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-"
			 "%02x%02x%02x%02x%02x%02x): %d",
			 b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11],
			 b[12], b[13], b[14], b[15], (int)r);
	}
	return r;
}
