/* Virtual memory, and memory that several processes hold: charged once, to its creator, and for as
 * long as anybody holds it. */
#include "suite.h"
#include <string.h>
#include <unistd.h>

#define IMPORTERS 8
#define FD CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

static const CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
					 .requestedHandleTypes = FD,
					 .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
static const CUmemAccessDesc rw = {{CU_MEM_LOCATION_TYPE_DEVICE, 0},
				   CU_MEM_ACCESS_FLAGS_PROT_READWRITE};

static CUdeviceptr reserve(uint64_t bytes)
{
	CUdeviceptr va;
	OK(cuMemAddressReserve(&va, bytes, 0, 0, 0));
	return va;
}

static CUdeviceptr map(CUmemGenericAllocationHandle h, uint64_t bytes)
{
	CUdeviceptr va = reserve(bytes);
	OK(cuMemMap(va, bytes, 0, h, 0));
	OK(cuMemSetAccess(va, bytes, &rw, 1));
	return va;
}

/* --- one process --------------------------------------------------------------------------- */

static void create_map_release_repeat(void)
{
	CUmemGenericAllocationHandle h;
	CUdeviceptr va[64];
	int n = 0;
	start();
	while (cuMemCreate(&h, 16 * MIB, &prop, 0) == CUDA_SUCCESS) {
		va[n++] = map(h, 16 * MIB);
		OK(cuMemRelease(h));
		both(0, CONTEXT + (uint64_t)n * 16 * MIB);
	}
	EQUAL(n, (LIMIT - CONTEXT) / (16 * MIB));
	while (n > 0)
		OK(cuMemUnmap(va[--n], 16 * MIB));
	both(0, CONTEXT);
}

static void retained(void)
{
	CUmemGenericAllocationHandle h, again, third;
	start();
	OK(cuMemCreate(&h, 4 * MIB, &prop, 0));
	CUdeviceptr va = map(h, 4 * MIB);
	OK(cuMemRelease(h));
	OK(cuMemRetainAllocationHandle(&again, (void *)(uintptr_t)(va + 3 * MIB)));
	OK(cuMemRetainAllocationHandle(&third, (void *)(uintptr_t)va));
	OK(cuMemUnmap(va, 4 * MIB));
	both(0, CONTEXT + 4 * MIB);
	OK(cuMemRelease(again));
	both(0, CONTEXT + 4 * MIB);
	OK(cuMemMap(va, 4 * MIB, 0, third, 0));
	OK(cuMemRelease(third));
	both(0, CONTEXT + 4 * MIB);
	IS(cuMemRelease(third), CUDA_ERROR_INVALID_VALUE);
	OK(cuMemUnmap(va, 4 * MIB));
	both(0, CONTEXT);
}

/* One unmap for several mappings, of one piece twice and of another. */
static void unmap_several(void)
{
	CUmemGenericAllocationHandle a, b;
	start();
	OK(cuMemCreate(&a, 4 * MIB, &prop, 0));
	OK(cuMemCreate(&b, 2 * MIB, &prop, 0));
	CUdeviceptr va = reserve(16 * MIB);
	OK(cuMemMap(va, 4 * MIB, 0, a, 0));
	OK(cuMemMap(va + 4 * MIB, 2 * MIB, 0, b, 0));
	OK(cuMemMap(va + 6 * MIB, 2 * MIB, 2 * MIB, a, 0));
	OK(cuMemRelease(a));
	OK(cuMemRelease(b));
	both(0, CONTEXT + 6 * MIB);
	IS(cuMemUnmap(va, 3 * MIB), CUDA_ERROR_INVALID_VALUE);
	both(0, CONTEXT + 6 * MIB);
	OK(cuMemUnmap(va, 6 * MIB));
	both(0, CONTEXT + 4 * MIB);
	OK(cuMemUnmap(va + 6 * MIB, 2 * MIB));
	both(0, CONTEXT);
}

/* Imported by who exported it: the import holds it as any other. */
static void import_own_export(void)
{
	CUmemGenericAllocationHandle h, again;
	int fd;
	start();
	OK(cuMemCreate(&h, 6 * MIB, &prop, 0));
	OK(cuMemExportToShareableHandle(&fd, h, FD, 0));
	OK(cuMemImportFromShareableHandle(&again, (void *)(intptr_t)fd, FD));
	close(fd);
	CUdeviceptr va = map(again, 6 * MIB);
	both(0, CONTEXT + 6 * MIB);
	OK(cuMemRelease(h));
	both(0, CONTEXT + 6 * MIB);
	OK(cuMemRelease(again));
	both(0, CONTEXT + 6 * MIB);
	OK(cuMemUnmap(va, 6 * MIB));
	both(0, CONTEXT);
}

static void host_located(void)
{
	CUmemAllocationProp host = prop;
	CUmemGenericAllocationHandle h;
	host.location = (CUmemLocation){(CUmemLocationType)2, 0};
	start();
	OK(cuMemCreate(&h, 64 * MIB, &host, 0));
	both(0, CONTEXT);
	OK(cuMemRelease(h));
	both(0, CONTEXT);
}

/* The simulator does not keep what is bound, the driver does: the ledger only. */
static void multicast(void)
{
	CUmulticastObjectProp p = {.numDevices = 1, .size = 8 * MIB, .handleTypes = FD};
	CUmemGenericAllocationHandle mc, a, b;
	start();
	OK(cuMulticastCreate(&mc, &p));
	OK(cuMulticastAddDevice(mc, 0));
	both(0, CONTEXT);
	OK(cuMemCreate(&a, 4 * MIB, &prop, 0));
	OK(cuMemCreate(&b, 4 * MIB, &prop, 0));
	OK(cuMulticastBindMem(mc, 0, a, 0, 4 * MIB, 0));
	CUdeviceptr va = map(b, 4 * MIB);
	OK(cuMulticastBindAddr(mc, 4 * MIB, va, 4 * MIB, 0));
	OK(cuMemRelease(a));
	OK(cuMemRelease(b));
	OK(cuMemUnmap(va, 4 * MIB));
	EQUAL(charged(0), CONTEXT + 8 * MIB);
	OK(cuMulticastUnbind(mc, 0, 0, 4 * MIB));
	EQUAL(charged(0), CONTEXT + 4 * MIB);
	OK(cuMemRelease(mc));
	both(0, CONTEXT);
}

/* --- several processes ----------------------------------------------------------------------- */

struct way {
	uint64_t bytes; /* what the exporter's memory takes */
	void (*exporter)(int sock);
	void (*importer)(int sock);
	size_t message;
	bool descriptor;
};

static int passed_on = -1; /* the descriptor; importers have it by fork too, and close that */

/* The exporter gives a message, a descriptor or both; each importer gets copies, says that it has the
 * memory open, closes it on a word, says so and ends on another. Who is killed is killed with it open. */
static void shared(const struct way *w, bool kill_exporter)
{
	char message[256];
	int ex, im[IMPORTERS];
	pid_t exporter = actor(w->exporter, &ex), importer[IMPORTERS];
	if (w->descriptor)
		passed_on = take_fd(ex);
	if (w->message > 0)
		take(ex, message, w->message);
	for (int i = 0; i < IMPORTERS; i++) {
		importer[i] = actor(w->importer, &im[i]);
		if (w->descriptor)
			give_fd(im[i], passed_on);
		if (w->message > 0)
			give(im[i], message, w->message);
	}
	for (int i = 0; i < IMPORTERS; i++)
		hear(im[i]);
	if (w->descriptor)
		close(passed_on);
	both(0, w->bytes + (1 + IMPORTERS) * CONTEXT); /* once */
	if (kill_exporter) {
		end(exporter);
		wait_both(0, w->bytes + IMPORTERS * CONTEXT);
	} else {
		say(ex); /* it frees */
		hear(ex);
		both(0, w->bytes + (1 + IMPORTERS) * CONTEXT);
	}
	uint64_t contexts = (IMPORTERS + (kill_exporter ? 0u : 1u)) * CONTEXT;
	for (int i = 0; i < IMPORTERS; i++) {
		uint64_t held = i + 1 < IMPORTERS ? w->bytes : 0;
		EQUAL(charged(0), w->bytes + contexts);
		if (i % 2 == 0) {
			end(importer[i]);
		} else {
			say(im[i]);
			hear(im[i]);
			both(0, held + contexts);
			say(im[i]);
			reap(importer[i]);
		}
		contexts -= CONTEXT;
		wait_both(0, held + contexts);
	}
	if (!kill_exporter) {
		say(ex);
		reap(exporter);
	}
	wait_both(0, 0);
}

static void ipc_exporter(int sock)
{
	CUdeviceptr p;
	CUipcMemHandle h;
	start();
	OK(cuMemAlloc_v2(&p, 64 * MIB));
	OK(cuIpcGetMemHandle(&h, p));
	OK(cuIpcGetMemHandle(&h, p));
	give(sock, &h, sizeof h);
	hear(sock);
	OK(cuMemFree_v2(p));
	say(sock);
	hear(sock);
}

/* Opened twice, as the driver counts openings. */
static void ipc_importer(int sock)
{
	CUdeviceptr p, q;
	CUipcMemHandle h;
	start();
	take(sock, &h, sizeof h);
	OK(cuIpcOpenMemHandle_v2(&p, h, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
	OK(cuIpcOpenMemHandle_v2(&q, h, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
	EQUAL(p, q);
	OK(cuIpcCloseMemHandle(p));
	say(sock);
	hear(sock);
	OK(cuIpcCloseMemHandle(p));
	say(sock);
	hear(sock);
}

/* A small allocation lies in a block with others, and who opens it holds the block. */
static void small_exporter(int sock)
{
	CUdeviceptr p, q;
	CUipcMemHandle h, g;
	start();
	OK(cuMemAlloc_v2(&p, 1000));
	OK(cuMemAlloc_v2(&q, 1000));
	OK(cuIpcGetMemHandle(&h, p));
	OK(cuIpcGetMemHandle(&g, q));
	give(sock, &h, sizeof h);
	hear(sock);
	OK(cuMemFree_v2(p));
	OK(cuMemFree_v2(q));
	say(sock);
	hear(sock);
}

static void small_importer(int sock)
{
	CUdeviceptr p;
	CUipcMemHandle h;
	CUcontext c = start();
	take(sock, &h, sizeof h);
	OK(cuIpcOpenMemHandle_v2(&p, h, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
	say(sock);
	hear(sock);
	/* What a context had open ends with it. */
	OK(cuCtxDestroy_v2(c));
	OK(cuCtxCreate_v2(&c, 0, 0));
	say(sock);
	hear(sock);
}

static void vmm_exporter(int sock)
{
	CUmemGenericAllocationHandle h;
	int fd;
	start();
	OK(cuMemCreate(&h, 6 * MIB, &prop, 0));
	CUdeviceptr va = map(h, 6 * MIB);
	OK(cuMemExportToShareableHandle(&fd, h, FD, 0));
	give_fd(sock, fd);
	close(fd);
	hear(sock);
	OK(cuMemUnmap(va, 6 * MIB));
	OK(cuMemRelease(h));
	say(sock);
	hear(sock);
}

static void vmm_importer(int sock)
{
	CUmemGenericAllocationHandle h;
	close(passed_on);
	start();
	int fd = take_fd(sock);
	OK(cuMemImportFromShareableHandle(&h, (void *)(intptr_t)fd, FD));
	close(fd);
	CUdeviceptr va = map(h, 6 * MIB);
	OK(cuMemRelease(h));
	say(sock);
	hear(sock);
	OK(cuMemUnmap(va, 6 * MIB));
	say(sock);
	hear(sock);
}

/* Holds the handle and never maps it, so that nothing tells how much it is. */
static void vmm_unmapped_importer(int sock)
{
	CUmemGenericAllocationHandle h;
	close(passed_on);
	start();
	int fd = take_fd(sock);
	OK(cuMemImportFromShareableHandle(&h, (void *)(intptr_t)fd, FD));
	close(fd);
	say(sock);
	hear(sock);
	OK(cuMemRelease(h));
	say(sock);
	hear(sock);
}

static void pool_exporter(int sock)
{
	CUmemPoolProps props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
				.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0},
				.handleTypes = FD};
	CUmemoryPool p;
	CUdeviceptr a;
	CUmemPoolPtrExportData d;
	int fd;
	start();
	OK(cuMemPoolCreate(&p, &props));
	OK(cuMemAllocFromPoolAsync(&a, 5000, p, NULL));
	OK(cuMemPoolExportToShareableHandle(&fd, p, FD, 0));
	OK(cuMemPoolExportPointer(&d, a));
	give_fd(sock, fd);
	give(sock, &d, sizeof d);
	hear(sock);
	/* What is only reserved for a call is nobody else's when it goes back. */
	for (int i = 0; i < 10; i++) {
		CUdeviceptr b;
		OK(cuMemAllocFromPoolAsync(&b, 5000, p, NULL));
		OK(cuMemFreeAsync(b, NULL));
		both(0, 32 * MIB + (1 + IMPORTERS) * CONTEXT);
	}
	OK(cuMemFreeAsync(a, NULL));
	OK(cuStreamSynchronize(NULL));
	OK(cuMemPoolTrimTo(p, 0));
	say(sock);
	hear(sock);
}

static void pool_importer(int sock)
{
	CUmemoryPool p;
	CUdeviceptr a;
	CUmemPoolPtrExportData d;
	close(passed_on);
	start();
	int fd = take_fd(sock);
	take(sock, &d, sizeof d);
	OK(cuMemPoolImportFromShareableHandle(&p, (void *)(intptr_t)fd, FD, 0));
	close(fd);
	OK(cuMemPoolImportPointer(&a, p, &d));
	say(sock);
	hear(sock);
	OK(cuMemFreeAsync(a, NULL));
	OK(cuStreamSynchronize(NULL));
	OK(cuMemPoolDestroy(p));
	say(sock);
	hear(sock);
}

#define WAY(fn, ...)                                                                               \
	static const struct way fn##_way = {__VA_ARGS__};                                          \
	static void fn##_freed(void)                                                               \
	{                                                                                          \
		shared(&fn##_way, false);                                                          \
	}                                                                                          \
	static void fn##_killed(void)                                                              \
	{                                                                                          \
		shared(&fn##_way, true);                                                           \
	}
WAY(ipc, 64 * MIB, ipc_exporter, ipc_importer, sizeof(CUipcMemHandle), false)
WAY(ipc_small, 2 * MIB, small_exporter, small_importer, sizeof(CUipcMemHandle), false)
WAY(vmm, 6 * MIB, vmm_exporter, vmm_importer, 0, true)
WAY(vmm_unmapped, 6 * MIB, vmm_exporter, vmm_unmapped_importer, 0, true)
WAY(pool, 32 * MIB, pool_exporter, pool_importer, sizeof(CUmemPoolPtrExportData), true)

#define T(f) {.name = #f, .run = f}
#define WIDE(f) {.name = #f, .run = f, .limit = 512 * MIB}
const struct suite_test share_tests[] = {T(create_map_release_repeat),
					 T(retained),
					 T(unmap_several),
					 T(import_own_export),
					 T(host_located),
					 T(multicast),
					 WIDE(ipc_freed),
					 WIDE(ipc_killed),
					 WIDE(ipc_small_freed),
					 WIDE(ipc_small_killed),
					 WIDE(vmm_freed),
					 WIDE(vmm_killed),
					 WIDE(vmm_unmapped_freed),
					 WIDE(vmm_unmapped_killed),
					 WIDE(pool_freed),
					 WIDE(pool_killed),
					 {.name = NULL}};
