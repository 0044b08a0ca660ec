/* The memory half of the simulated driver, against libcuda.so.1 on a machine of its own. Each test runs
 * in a child, because a process that has called cuInit cannot fork and go on. The truth is read from
 * the state file. */
#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include "cuda_abi.h"
#include "cuda_new.h"
#include "state.h"

#define MIB (1ull << 20)
#define CAPACITY (512 * MIB)
#define CONTEXT (32 * MIB)

static char dir[64];

#define CHECK(x)                                                                                   \
	do {                                                                                       \
		if (!(x)) {                                                                        \
			fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #x);                    \
			exit(1);                                                                   \
		}                                                                                  \
	} while (0)
#define IS(call, want)                                                                             \
	do {                                                                                       \
		CUresult r_ = (call);                                                              \
		if (r_ != (want)) {                                                                \
			fprintf(stderr, "%s:%d: %s: %d, not %d\n", __FILE__, __LINE__, #call,      \
				(int)r_, (int)(want));                                             \
			exit(1);                                                                   \
		}                                                                                  \
	} while (0)
#define OK(call) IS(call, CUDA_SUCCESS)
#define OOM CUDA_ERROR_OUT_OF_MEMORY

static struct sim_gpu *gpu(void)
{
	const char *why;
	if (!sim_shared && !sim_state_open(dir, &why)) {
		fprintf(stderr, "state: %s\n", why);
		exit(1);
	}
	return &sim_shared->gpu[0];
}

static uint64_t used(void)
{
	gpu();
	sim_reap();
	return gpu()->used;
}

static CUcontext start(void)
{
	CUcontext c;
	OK(cuInit(0));
	OK(cuCtxCreate_v2(&c, 0, 0));
	return c;
}

/* --- to the limit ---------------------------------------------------------------------------------- */

static void fill(const char *name, uint64_t granule, CUresult (*take)(uint64_t bytes))
{
	uint64_t before = used(), n = 0;
	CUresult r;
	while (!(r = take(granule)))
		n++;
	IS(r, OOM);
	printf("  %-10s %6llu x %8llu bytes, used %llu of %llu\n", name, (unsigned long long)n,
	       (unsigned long long)granule, (unsigned long long)used(), (unsigned long long)CAPACITY);
	CHECK(used() <= CAPACITY && CAPACITY - used() < granule);
	CHECK(used() - before >= n * granule);
}

static CUresult take_plain(uint64_t n)
{
	CUdeviceptr p;
	CUresult r = cuMemAlloc_v2(&p, n);
	CHECK(r || n <= MIB || p % (2 * MIB) == 0);
	return r;
}

static CUresult take_managed(uint64_t n)
{
	CUdeviceptr p;
	return cuMemAllocManaged(&p, n, CU_MEM_ATTACH_GLOBAL);
}

static CUresult take_pitch(uint64_t n)
{
	CUdeviceptr p;
	size_t pitch;
	CUresult r = cuMemAllocPitch_v2(&p, &pitch, 1000, n / 1024, 4);
	CHECK(r || pitch == 1024);
	return r;
}

static CUresult take_array(uint64_t n)
{
	CUarray a;
	CUDA_ARRAY_DESCRIPTOR d = { .Width = 64, .Height = n / 256, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 1 };
	return cuArrayCreate_v2(&a, &d);
}

static CUresult take_layered(uint64_t n)
{
	CUarray a;
	CUDA_ARRAY3D_DESCRIPTOR d = { .Width = 64, .Height = 64, .Depth = n / 4096, .Flags = 1,
				      .Format = CU_AD_FORMAT_UNSIGNED_INT8, .NumChannels = 1 };
	return cuArray3DCreate_v2(&a, &d);
}

static CUresult take_vmm(uint64_t n)
{
	CUmemGenericAllocationHandle h;
	CUmemAllocationProp p = { .type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = { CU_MEM_LOCATION_TYPE_DEVICE, 0 } };
	return cuMemCreate(&h, n, &p, 0);
}

static CUresult take_pool(uint64_t n)
{
	CUdeviceptr p;
	return cuMemAllocAsync(&p, n, NULL);
}

static CUresult take_context(uint64_t n)
{
	CUcontext c;
	(void)n;
	return cuCtxCreate_v2(&c, 0, 0);
}

static CUresult take_external(uint64_t n)
{
	CUexternalMemory m;
	CUDA_EXTERNAL_MEMORY_HANDLE_DESC d = { .type = CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD, .handle.fd = -1, .size = n };
	return cuImportExternalMemory(&m, &d);
}

static CUresult take_mipmap(uint64_t n)
{
	CUmipmappedArray m;
	/* 128 x 128 floats and its seven smaller levels: 88 KiB in rows of 64 bytes and groups of 8. */
	CUDA_ARRAY3D_DESCRIPTOR d = { .Width = 128, .Height = 128, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 1 };
	(void)n;
	return cuMipmappedArrayCreate(&m, &d, 8);
}

#define FILL(name, granule)                                                                        \
	static void fill_##name(void)                                                              \
	{                                                                                          \
		CUcontext c = start();                                                             \
		fill(#name, granule, take_##name);                                                 \
		(void)c;                                                                           \
	}
FILL(plain, 2 * MIB)
FILL(managed, 2 * MIB)
FILL(pitch, 2 * MIB)
FILL(array, 64 << 10)
FILL(layered, 64 << 10)
FILL(mipmap, 128 << 10)
FILL(vmm, 2 * MIB)
FILL(pool, 32 * MIB)
FILL(context, CONTEXT)
FILL(external, 2 * MIB)

static void small_share_blocks(void)
{
	CUdeviceptr p[5], base;
	size_t size;
	start();
	uint64_t before = used();
	for (int i = 0; i < 4; i++)
		OK(cuMemAlloc_v2(&p[i], 500 << 10));
	CHECK(used() - before == 2 * MIB && p[1] - p[0] == 500 << 10);
	OK(cuMemAlloc_v2(&p[4], 500 << 10));
	CHECK(used() - before == 4 * MIB);
	OK(cuMemGetAddressRange_v2(&base, &size, p[2] + 17));
	CHECK(base == p[2] && size == 500 << 10);
	for (int i = 0; i < 5; i++)
		OK(cuMemFree_v2(p[i]));
	CHECK(used() == before);
	IS(cuMemFree_v2(p[0]), CUDA_ERROR_INVALID_VALUE);
}

static void context_frees(void)
{
	CUdeviceptr p;
	CUmodule m;
	CUcontext c = start();
	OK(cuMemAlloc_v2(&p, 10 * MIB));
	OK(cuModuleLoadData(&m, "ptx"));
	take_array(64 << 10);
	CHECK(used() == CONTEXT + 10 * MIB + 2 * MIB + (64 << 10));
	OK(cuCtxDestroy_v2(c));
	CHECK(used() == 0);
	IS(cuMemAlloc_v2(&p, 1), CUDA_ERROR_INVALID_CONTEXT);
	OK(cuDevicePrimaryCtxRetain(&c, 0));
	OK(cuCtxSetCurrent(c));
	OK(cuMemAlloc_v2(&p, 1));
	OK(cuDevicePrimaryCtxRelease_v2(0));
	CHECK(used() == 0);
	IS(cuMemAlloc_v2(&p, 1), CUDA_ERROR_CONTEXT_IS_DESTROYED);
}

/* --- contents --------------------------------------------------------------------------------------- */

static void copies(void)
{
	CUdeviceptr a, b;
	uint8_t host[64 * 64], back[64 * 64];
	start();
	for (size_t i = 0; i < sizeof host; i++)
		host[i] = (uint8_t)(i * 7);
	OK(cuMemAlloc_v2(&a, sizeof host));
	OK(cuMemAlloc_v2(&b, sizeof host));
	OK(cuMemcpyHtoD_v2(a, host, sizeof host));
	OK(cuMemcpyDtoDAsync_v2(b, a, sizeof host, NULL));
	OK(cuMemcpyDtoH_v2(back, b, sizeof host));
	CHECK(!memcmp(host, back, sizeof host));
	IS(cuMemcpyHtoD_v2(a + 1, host, sizeof host), CUDA_ERROR_INVALID_VALUE);
	IS(cuMemcpyDtoH_v2(back, 0x1234, 1), CUDA_ERROR_INVALID_VALUE);
	OK(cuMemsetD32_v2(a, 0xdeadbeef, sizeof host / 4));
	OK(cuMemsetD2D8_v2(a, 64, 0x55, 2, 3));
	OK(cuMemcpyDtoH_v2(back, a, sizeof host));
	CHECK(back[0] == 0x55 && back[1] == 0x55 && back[2] == 0xad && back[128] == 0x55 && back[192] == 0xef);
	CUarray array;
	CUDA_ARRAY_DESCRIPTOR d = { .Width = 32, .Height = 32, .Format = CU_AD_FORMAT_UNSIGNED_INT8, .NumChannels = 2 };
	OK(cuArrayCreate_v2(&array, &d));
	CUDA_MEMCPY2D in = { .srcMemoryType = CU_MEMORYTYPE_HOST, .srcHost = host, .srcPitch = 64,
			     .dstMemoryType = CU_MEMORYTYPE_ARRAY, .dstArray = array, .WidthInBytes = 64, .Height = 32 };
	OK(cuMemcpy2D_v2(&in));
	CUDA_MEMCPY2D out = { .srcMemoryType = CU_MEMORYTYPE_ARRAY, .srcArray = array, .srcXInBytes = 4, .srcY = 3,
			      .dstMemoryType = CU_MEMORYTYPE_HOST, .dstHost = back, .dstPitch = 16, .WidthInBytes = 16,
			      .Height = 4 };
	OK(cuMemcpy2D_v2(&out));
	for (size_t y = 0; y < 4; y++)
		CHECK(!memcmp(back + 16 * y, host + 64 * (y + 3) + 4, 16));
	in.Height = 33;
	IS(cuMemcpy2D_v2(&in), CUDA_ERROR_INVALID_VALUE);
	CUDA_ARRAY_DESCRIPTOR got;
	OK(cuArrayGetDescriptor_v2(&got, array));
	CHECK(got.Width == 32 && got.NumChannels == 2);
}

static void untouched_is_free(void)
{
	CUdeviceptr p;
	start();
	OK(cuMemAlloc_v2(&p, 256 * MIB));
	OK(cuMemsetD8_v2(p, 1, 4096));
	OK(cuMemFree_v2(p));
	OK(cuMemAlloc_v2(&p, 256 * MIB)); /* other addresses or emptied ones: never the old contents */
	uint8_t b = 9;
	OK(cuMemcpyDtoH_v2(&b, p, 1));
	CHECK(b == 0);
}

static void zeroed(void)
{
	CUdeviceptr p;
	uint8_t a[3];
	start();
	OK(cuMemAlloc_v2(&p, 16 * MIB));
	OK(cuMemsetD8_v2(p, 7, 8 * MIB));
	OK(cuMemsetD8_v2(p + 1, 0, 4 * MIB));
	OK(cuMemcpyDtoH_v2(a, p, 3));
	CHECK(a[0] == 7 && !a[1] && !a[2]);
	OK(cuMemcpyDtoH_v2(a, p + 4 * MIB - 1, 3));
	CHECK(!a[0] && !a[1] && a[2] == 7);
	OK(cuMemcpyDtoH_v2(a, p + 2 * MIB, 3));
	CHECK(!a[0] && !a[1] && !a[2]);
}

static void first_generation(void)
{
	CUdeviceptr_v1 p;
	unsigned free_bytes, total;
	uint32_t v = 0x01020304, w = 0;
	start();
	OK(cuMemAlloc(&p, 1000));
	OK(cuMemcpyHtoD(p, &v, 4));
	OK(cuMemcpyDtoH(&w, p, 4));
	CHECK(v == w);
	OK(cuMemGetInfo(&free_bytes, &total));
	CHECK(total == CAPACITY && free_bytes == CAPACITY - used());
	OK(cuMemFree(p));
}

/* --- pools ------------------------------------------------------------------------------------------ */

static uint64_t pool_value(CUmemoryPool p, CUmemPool_attribute a)
{
	cuuint64_t v = 0;
	OK(cuMemPoolGetAttribute(p, a, &v));
	return v;
}

static void pools(void)
{
	CUmemoryPool p, q;
	CUdeviceptr a, b;
	cuuint64_t keep = 32 * MIB, zero = 0;
	start();
	uint64_t before = used();
	OK(cuDeviceGetDefaultMemPool(&p, 0));
	OK(cuMemAllocAsync(&a, 20 * MIB, NULL));
	OK(cuMemAllocAsync(&b, 20 * MIB, NULL));
	CHECK(used() - before == 64 * MIB);
	CHECK(pool_value(p, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT) == 64 * MIB);
	CHECK(pool_value(p, CU_MEMPOOL_ATTR_USED_MEM_CURRENT) == 40 * MIB);
	OK(cuMemFreeAsync(a, NULL));
	CHECK(used() - before == 64 * MIB); /* not before a synchronisation */
	OK(cuStreamSynchronize(NULL));
	CHECK(used() - before == 32 * MIB);
	OK(cuMemPoolSetAttribute(p, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &keep));
	OK(cuMemFreeAsync(b, NULL));
	OK(cuCtxSynchronize());
	CHECK(used() - before == 32 * MIB);
	OK(cuMemPoolTrimTo(p, 0));
	CHECK(used() == before && pool_value(p, CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH) == 64 * MIB);
	OK(cuMemPoolSetAttribute(p, CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH, &zero));
	CHECK(pool_value(p, CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH) == 0);
	CUmemPoolProps props = { .allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = { CU_MEM_LOCATION_TYPE_DEVICE, 0 } };
	OK(cuMemPoolCreate(&q, &props));
	OK(cuMemAllocFromPoolAsync(&a, 1000, q, NULL));
	OK(cuMemPoolDestroy(q));
	CHECK(used() - before == 32 * MIB); /* lives until its allocation is gone */
	IS(cuMemAllocFromPoolAsync(&b, 1000, q, NULL), CUDA_ERROR_INVALID_VALUE);
	OK(cuMemFree_v2(a));
	CHECK(used() == before);
}

/* --- VMM -------------------------------------------------------------------------------------------- */

static const CUmemAllocationProp vmm_prop = { .type = CU_MEM_ALLOCATION_TYPE_PINNED,
					      .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
					      .location = { CU_MEM_LOCATION_TYPE_DEVICE, 0 } };
static const CUmemAccessDesc rw = { { CU_MEM_LOCATION_TYPE_DEVICE, 0 }, CU_MEM_ACCESS_FLAGS_PROT_READWRITE };

static void vmm_lifetimes(void)
{
	CUmemGenericAllocationHandle h, again;
	CUdeviceptr va;
	uint32_t v = 42, w = 0;
	int fd;
	start();
	uint64_t before = used();
	IS(cuMemCreate(&h, 1000, &vmm_prop, 0), CUDA_ERROR_INVALID_VALUE);
	OK(cuMemCreate(&h, 4 * MIB, &vmm_prop, 0));
	CHECK(used() - before == 4 * MIB);
	OK(cuMemAddressReserve(&va, 16 * MIB, 0, 0, 0));
	OK(cuMemMap(va + 2 * MIB, 4 * MIB, 0, h, 0));
	OK(cuMemSetAccess(va + 2 * MIB, 4 * MIB, &rw, 1));
	OK(cuMemRelease(h));
	CHECK(used() - before == 4 * MIB); /* the mapping holds it */
	IS(cuMemRelease(h), CUDA_ERROR_INVALID_VALUE);
	OK(cuMemcpyHtoD_v2(va + 2 * MIB + 8, &v, 4));
	OK(cuMemRetainAllocationHandle(&again, (void *)(uintptr_t)(va + 3 * MIB)));
	IS(cuMemAddressFree(va, 16 * MIB), CUDA_ERROR_INVALID_VALUE);
	OK(cuMemUnmap(va + 2 * MIB, 4 * MIB));
	CHECK(used() - before == 4 * MIB); /* the retained handle holds it */
	IS(cuMemcpyHtoD_v2(va + 2 * MIB, &v, 4), CUDA_ERROR_INVALID_VALUE);
	OK(cuMemMap(va, 4 * MIB, 0, again, 0));
	OK(cuMemSetAccess(va, 4 * MIB, &rw, 1));
	OK(cuMemcpyDtoH_v2(&w, va + 8, 4));
	CHECK(w == v);
	OK(cuMemExportToShareableHandle(&fd, again, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
	OK(cuMemRelease(again));
	OK(cuMemUnmap(va, 4 * MIB));
	CHECK(used() - before == 4 * MIB); /* the exported descriptor holds it */
	close(fd);
	CHECK(used() == before);
	OK(cuMemAddressFree(va, 16 * MIB));
}

/* --- between processes ------------------------------------------------------------------------------- */

/* One byte each way keeps two processes in step. */
static void say(int fd)
{
	CHECK(write(fd, "x", 1) == 1);
}

static void hear(int fd)
{
	char c;
	CHECK(read(fd, &c, 1) == 1);
}

static void send_fd(int sock, int fd)
{
	char c = 'f', buf[CMSG_SPACE(sizeof(int))] = { 0 };
	struct iovec io = { &c, 1 };
	struct msghdr m = { .msg_iov = &io, .msg_iovlen = 1, .msg_control = buf, .msg_controllen = sizeof buf };
	struct cmsghdr *h = CMSG_FIRSTHDR(&m);
	h->cmsg_level = SOL_SOCKET;
	h->cmsg_type = SCM_RIGHTS;
	h->cmsg_len = CMSG_LEN(sizeof fd);
	memcpy(CMSG_DATA(h), &fd, sizeof fd);
	CHECK(sendmsg(sock, &m, 0) == 1);
}

static int receive_fd(int sock)
{
	char c, buf[CMSG_SPACE(sizeof(int))];
	struct iovec io = { &c, 1 };
	struct msghdr m = { .msg_iov = &io, .msg_iovlen = 1, .msg_control = buf, .msg_controllen = sizeof buf };
	int fd;
	CHECK(recvmsg(sock, &m, 0) == 1 && CMSG_FIRSTHDR(&m));
	memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&m)), sizeof fd);
	return fd;
}

static pid_t child(void (*f)(int sock), int *sock)
{
	int s[2];
	CHECK(!socketpair(AF_UNIX, SOCK_STREAM, 0, s));
	fflush(stdout);
	pid_t pid = fork();
	CHECK(pid >= 0);
	if (!pid) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		close(s[0]);
		f(s[1]);
		exit(0);
	}
	close(s[1]);
	*sock = s[0];
	return pid;
}

static void reap_child(pid_t pid)
{
	int status;
	CHECK(waitpid(pid, &status, 0) == pid && status == 0);
}

static void end_child(pid_t pid)
{
	CHECK(!kill(pid, SIGKILL) && waitpid(pid, NULL, 0) == pid);
}

static void other_takes(int sock)
{
	CUdeviceptr p;
	start();
	OK(cuMemAlloc_v2(&p, 300 * MIB));
	say(sock);
	hear(sock);
}

static void one_capacity(void)
{
	int sock;
	CUdeviceptr p;
	size_t free_bytes, total;
	pid_t pid = child(other_takes, &sock);
	hear(sock);
	start();
	OK(cuMemGetInfo_v2(&free_bytes, &total));
	CHECK(free_bytes == CAPACITY - 300 * MIB - 2 * CONTEXT);
	IS(cuMemAlloc_v2(&p, free_bytes + 1), OOM);
	say(sock);
	reap_child(pid);
	OK(cuMemAlloc_v2(&p, free_bytes + 100 * MIB)); /* the dead process's memory is found when it is needed */
}

static void allocate_and_fork(int sock)
{
	CUdeviceptr p;
	start();
	OK(cuMemAlloc_v2(&p, 64 * MIB));
	pid_t fork_pid = fork();
	if (!fork_pid) {
		CUdeviceptr q;
		IS(cuMemAlloc_v2(&q, 1), CUDA_ERROR_NOT_INITIALIZED);
		IS(cuInit(0), CUDA_ERROR_NOT_INITIALIZED);
		hear(sock);
		_exit(0);
	}
	CHECK(write(sock, &fork_pid, sizeof fork_pid) == sizeof fork_pid);
	for (;;) { /* until killed, in the middle of anything */
		OK(cuMemAlloc_v2(&p, 3 * MIB));
		OK(cuMemFree_v2(p));
	}
}

static void wait_used(uint64_t want)
{
	for (int i = 0; i < 2000 && used() != want; i++)
		nanosleep(&(struct timespec){ 0, 1000000 }, NULL);
	CHECK(used() == want);
}

static void killed_with_live_fork(void)
{
	for (int round = 0; round < 20; round++) {
		int sock;
		pid_t pid = child(allocate_and_fork, &sock), fork_pid;
		CHECK(read(sock, &fork_pid, sizeof fork_pid) == sizeof fork_pid);
		nanosleep(&(struct timespec){ 0, 1000000 + 300000 * round }, NULL);
		end_child(pid);
		uint64_t now = used();
		CHECK(now == CONTEXT + 64 * MIB || now == CONTEXT + 68 * MIB);
		say(sock); /* the fork ends: only now is the memory free */
		wait_used(0);
		close(sock);
	}
}

/* Allocates and frees at random until it is killed. */
static void churn(int sock)
{
	CUdeviceptr p[8] = { 0 };
	CUmemGenericAllocationHandle h;
	CUcontext c;
	OK(cuInit(0));
	while (cuCtxCreate_v2(&c, 0, 0)) /* the others have it all */
		sched_yield();
	srand((unsigned)getpid());
	say(sock);
	for (;;) {
		int i = rand() % 8;
		if (p[i]) {
			OK(cuMemFree_v2(p[i]));
			p[i] = 0;
		} else if (cuMemAlloc_v2(&p[i], 1 + (size_t)rand() % (size_t)(12 * MIB))) {
			p[i] = 0;
		}
		if (i == 0 && !cuMemCreate(&h, 4 * MIB, &vmm_prop, 0))
			OK(cuMemRelease(h));
	}
}

#define CHURNERS 10

static void churn_and_kill(void)
{
	pid_t pid[CHURNERS];
	int sock[CHURNERS];
	for (int i = 0; i < CHURNERS; i++)
		pid[i] = child(churn, &sock[i]);
	for (int i = 0; i < CHURNERS; i++)
		hear(sock[i]);
	for (int round = 0; round < 40; round++) {
		int i = round % CHURNERS;
		end_child(pid[i]);
		close(sock[i]);
		CHECK(used() <= CAPACITY);
		pid[i] = child(churn, &sock[i]);
		hear(sock[i]);
	}
	for (int i = 0; i < CHURNERS; i++)
		end_child(pid[i]);
	wait_used(0);
	CHECK(gpu()->orphans == 0 && gpu()->peak <= CAPACITY);
}

static void export_ipc(int sock)
{
	CUdeviceptr p;
	CUipcMemHandle h;
	uint32_t v = 0xabcdef01;
	start();
	OK(cuMemAlloc_v2(&p, 64 * MIB));
	OK(cuMemcpyHtoD_v2(p + 4096, &v, 4));
	OK(cuIpcGetMemHandle(&h, p));
	CHECK(write(sock, &h, sizeof h) == sizeof h);
	hear(sock);
	OK(cuMemFree_v2(p));
	say(sock);
	hear(sock);
}

static void import_ipc(int sock)
{
	CUipcMemHandle h;
	CUdeviceptr p, q;
	uint32_t v = 0;
	start();
	CHECK(read(sock, &h, sizeof h) == sizeof h);
	OK(cuIpcOpenMemHandle_v2(&p, h, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
	OK(cuIpcOpenMemHandle_v2(&q, h, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
	CHECK(p == q);
	OK(cuMemcpyDtoH_v2(&v, p + 4096, 4));
	CHECK(v == 0xabcdef01);
	IS(cuMemFree_v2(p), CUDA_ERROR_INVALID_VALUE);
	say(sock);
	hear(sock);
	OK(cuMemcpyDtoH_v2(&v, p + 4096, 4)); /* still there */
	CHECK(v == 0xabcdef01);
	OK(cuIpcCloseMemHandle(p));
	OK(cuIpcCloseMemHandle(q));
	say(sock);
	hear(sock);
}

#define IMPORTERS 8

static void ipc_many(bool kill_exporter)
{
	int ex, im[IMPORTERS];
	pid_t pid = child(export_ipc, &ex), ip[IMPORTERS];
	CUipcMemHandle h;
	CHECK(read(ex, &h, sizeof h) == sizeof h);
	for (int i = 0; i < IMPORTERS; i++) {
		ip[i] = child(import_ipc, &im[i]);
		CHECK(write(im[i], &h, sizeof h) == sizeof h);
	}
	for (int i = 0; i < IMPORTERS; i++)
		hear(im[i]);
	CHECK(used() == 64 * MIB + (1 + IMPORTERS) * CONTEXT); /* once */
	if (kill_exporter) {
		end_child(pid);
		wait_used(64 * MIB + IMPORTERS * CONTEXT);
	} else {
		say(ex);
		hear(ex);
		CHECK(used() == 64 * MIB + (1 + IMPORTERS) * CONTEXT); /* freed, but held by importers */
	}
	CHECK(gpu()->orphans == 64 * MIB);
	for (int i = 0; i < IMPORTERS; i++) {
		CHECK(used() >= 64 * MIB);
		if (i % 2) {
			end_child(ip[i]);
			continue;
		}
		say(im[i]);
		hear(im[i]);
		say(im[i]);
		reap_child(ip[i]);
	}
	wait_used(kill_exporter ? 0 : CONTEXT);
	if (!kill_exporter) {
		say(ex);
		reap_child(pid);
	}
	wait_used(0);
}

static void ipc_exporter_frees(void)
{
	ipc_many(false);
}

static void ipc_exporter_killed(void)
{
	ipc_many(true);
}

static void export_vmm(int sock)
{
	CUmemGenericAllocationHandle h;
	CUdeviceptr va;
	uint32_t v = 77;
	int fd;
	start();
	OK(cuMemCreate(&h, 6 * MIB, &vmm_prop, 0));
	OK(cuMemAddressReserve(&va, 6 * MIB, 0, 0, 0));
	OK(cuMemMap(va, 6 * MIB, 0, h, 0));
	OK(cuMemSetAccess(va, 6 * MIB, &rw, 1));
	OK(cuMemcpyHtoD_v2(va + 5 * MIB, &v, 4));
	OK(cuMemExportToShareableHandle(&fd, h, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
	send_fd(sock, fd);
	close(fd);
	hear(sock);
}

static void vmm_import(void)
{
	CUmemGenericAllocationHandle h;
	CUdeviceptr va;
	uint32_t v = 0;
	int sock;
	pid_t pid = child(export_vmm, &sock);
	int fd = receive_fd(sock);
	start();
	OK(cuMemImportFromShareableHandle(&h, (void *)(intptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
	OK(cuMemAddressReserve(&va, 6 * MIB, 0, 0, 0));
	OK(cuMemMap(va, 6 * MIB, 0, h, 0));
	OK(cuMemSetAccess(va, 6 * MIB, &rw, 1));
	OK(cuMemcpyDtoH_v2(&v, va + 5 * MIB, 4));
	CHECK(v == 77 && used() == 6 * MIB + 2 * CONTEXT);
	end_child(pid);
	wait_used(6 * MIB + CONTEXT);
	v = 0;
	OK(cuMemcpyDtoH_v2(&v, va + 5 * MIB, 4));
	CHECK(v == 77);
	close(fd);
	OK(cuMemRelease(h));
	CHECK(used() == 6 * MIB + CONTEXT);
	OK(cuMemUnmap(va, 6 * MIB));
	CHECK(used() == CONTEXT);
}

static void vmm_in_transit(void)
{
	int sock;
	pid_t pid = child(export_vmm, &sock);
	int fd = receive_fd(sock);
	end_child(pid);
	wait_used(6 * MIB); /* nobody but the descriptor holds it */
	close(fd);
	wait_used(0);
}

static void export_pool(int sock)
{
	CUmemoryPool p;
	CUdeviceptr a;
	CUmemPoolPtrExportData d;
	uint32_t v = 99;
	int fd;
	CUmemPoolProps props = { .allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = { CU_MEM_LOCATION_TYPE_DEVICE, 0 },
				 .handleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR };
	start();
	OK(cuMemPoolCreate(&p, &props));
	OK(cuMemAllocFromPoolAsync(&a, 1000, p, NULL));
	OK(cuMemAllocFromPoolAsync(&a, 5000, p, NULL));
	OK(cuMemcpyHtoD_v2(a, &v, 4));
	OK(cuMemPoolExportToShareableHandle(&fd, p, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
	OK(cuMemPoolExportPointer(&d, a));
	send_fd(sock, fd);
	CHECK(write(sock, &d, sizeof d) == sizeof d);
	hear(sock);
}

static void pool_import(void)
{
	CUmemoryPool p;
	CUdeviceptr a;
	CUmemPoolPtrExportData d;
	uint32_t v = 0;
	int sock;
	pid_t pid = child(export_pool, &sock);
	int fd = receive_fd(sock);
	CHECK(read(sock, &d, sizeof d) == sizeof d);
	start();
	OK(cuMemPoolImportFromShareableHandle(&p, (void *)(intptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
	close(fd);
	OK(cuMemPoolImportPointer(&a, p, &d));
	OK(cuMemcpyDtoH_v2(&v, a, 4));
	CHECK(v == 99 && used() == 32 * MIB + 2 * CONTEXT);
	end_child(pid);
	wait_used(32 * MIB + CONTEXT);
	OK(cuMemFreeAsync(a, NULL));
	CHECK(used() == CONTEXT);
	OK(cuMemPoolDestroy(p));
}

/* --- start ------------------------------------------------------------------------------------------- */

static int visible(const char *list)
{
	int sock, n = 0;
	(void)sock;
	int p[2];
	CHECK(!pipe(p));
	pid_t pid = fork();
	if (!pid) {
		if (list)
			setenv("CUDA_VISIBLE_DEVICES", list, 1);
		CUresult r = cuInit(0);
		n = r == CUDA_ERROR_NO_DEVICE ? 0 : r ? -(int)r : (cuDeviceGetCount(&n), n);
		CHECK(write(p[1], &n, sizeof n) == sizeof n);
		_exit(0);
	}
	CHECK(read(p[0], &n, sizeof n) == sizeof n && waitpid(pid, NULL, 0) == pid);
	return n;
}

static void visible_devices(void)
{
	char uuid[64], prefix[16], two[128];
	gpu();
	snprintf(uuid, sizeof uuid, "%s", sim_shared->gpu[1].uuid);
	snprintf(prefix, sizeof prefix, "%.10s", uuid);
	snprintf(two, sizeof two, "%s,0", uuid);
	CHECK(visible(NULL) == 3 && visible("") == 0 && visible("-1") == 0 && visible("1") == 1);
	CHECK(visible("2,0") == 2 && visible("0,7,1") == 1 && visible("0,-1,1") == 1 && visible("0,0") == 0);
	CHECK(visible(uuid) == 1 && visible(prefix) == 1 && visible(two) == 2 && visible("GPU-zz") == 0);
	CHECK(visible("x") == 0 && visible("1, 2") == 2);
}

static void faults(void)
{
	int status;
	pid_t pid = fork();
	if (!pid) {
		setenv("TRANCHE_SIM_FAIL", "cuMemAlloc_v2:2:2,cuCtxSynchronize:0:719", 1);
		execl("/proc/self/exe", "memory", "faulty", dir, (char *)NULL);
		_exit(127);
	}
	CHECK(waitpid(pid, &status, 0) == pid && status == 0);
}

static void faulty(void)
{
	CUdeviceptr p;
	start();
	OK(cuMemAlloc_v2(&p, 1));
	IS(cuMemAlloc_v2(&p, 1), OOM);
	OK(cuMemAlloc_v2(&p, 1));
	IS(cuCtxSynchronize(), 719);
	IS(cuCtxSynchronize(), 719);
}

static void after_exec(void)
{
	int p[2];
	char c;
	CHECK(!pipe(p));
	pid_t pid = fork();
	if (!pid) {
		start();
		dup2(p[1], 1);
		close(p[0]);
		close(p[1]);
		execl("/bin/sh", "sh", "-c", "echo x; read y", (char *)NULL);
		_exit(127);
	}
	CHECK(read(p[0], &c, 1) == 1);
	wait_used(0); /* exec closed the driver's descriptors */
	end_child(pid);
}

static void lost(void)
{
	CUdeviceptr p;
	start();
	gpu()->lost = 1;
	IS(cuMemAlloc_v2(&p, 1), CUDA_ERROR_UNKNOWN);
	gpu()->lost = 0;
}

static const struct { const char *name; void (*run)(void); } tests[] = {
#define T(f) { #f, f }
	T(fill_plain), T(fill_managed), T(fill_pitch), T(fill_array), T(fill_layered), T(fill_mipmap), T(fill_vmm),
	T(fill_pool), T(fill_context), T(fill_external), T(small_share_blocks), T(context_frees), T(copies),
	T(untouched_is_free), T(zeroed), T(first_generation), T(pools), T(vmm_lifetimes), T(one_capacity),
	T(killed_with_live_fork), T(churn_and_kill), T(ipc_exporter_frees), T(ipc_exporter_killed), T(vmm_import), T(vmm_in_transit),
	T(pool_import), T(visible_devices), T(faults), T(after_exec), T(lost),
};

static void make_machine(void)
{
	char path[128];
	snprintf(dir, sizeof dir, "/dev/shm/simgpu-test-%d", (int)getpid());
	CHECK(!mkdir(dir, 0700));
	snprintf(path, sizeof path, "%s/spec", dir);
	FILE *f = fopen(path, "w");
	CHECK(f);
	fprintf(f, "gpu model=t4 count=3 memory=%llu context=%llu\n", CAPACITY, CONTEXT);
	fclose(f);
}

int main(int argc, char **argv)
{
	int failed = 0;
	char command[128];
	if (argc == 3 && !strcmp(argv[1], "faulty")) {
		snprintf(dir, sizeof dir, "%s", argv[2]);
		faulty();
		return 0;
	}
	make_machine();
	setenv("TRANCHE_SIM_DIR", dir, 1);
	unsetenv("CUDA_VISIBLE_DEVICES");
	for (size_t i = 0; i < sizeof tests / sizeof tests[0]; i++) {
		int status;
		if (argc == 2 && strcmp(argv[1], tests[i].name))
			continue;
		fflush(stdout);
		pid_t pid = fork();
		if (!pid) {
			alarm(60);
			tests[i].run();
			exit(0);
		}
		CHECK(waitpid(pid, &status, 0) == pid);
		printf("%s %s\n", status ? "FAIL" : "ok  ", tests[i].name);
		failed += status != 0;
		if (used()) {
			printf("FAIL %s: %llu bytes left behind\n", tests[i].name, (unsigned long long)used());
			failed++;
		}
	}
	snprintf(command, sizeof command, "rm -r %s", dir);
	return system(command) || failed;
}
