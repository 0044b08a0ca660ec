#include <dlfcn.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include "bench.h"

static void must(CUresult r, const char *what)
{
	if (r)
		die("%s: error %d", what, (int)r);
}

void api_open(struct api *a, const char *path)
{
	void *h = dlopen(path, RTLD_NOW | RTLD_LOCAL), *p;

	if (!h)
		die("%s", dlerror());
#define X(name)                                                                                    \
	p = dlsym(h, #name);                                                                       \
	if (!p)                                                                                    \
		die("%s has no %s", path, #name);                                                  \
	memcpy(&a->name, &p, sizeof p);
	API(X)
#undef X
}

CUcontext api_start(const struct api *a)
{
	CUcontext c;
	CUdevice d;

	must(a->cuInit(0), "cuInit");
	must(a->cuDeviceGet(&d, 0), "cuDeviceGet");
	must(a->cuDevicePrimaryCtxRetain(&c, d), "cuDevicePrimaryCtxRetain");
	must(a->cuCtxSetCurrent(c), "cuCtxSetCurrent");
	return c;
}

static void driver_uuid(const char *driver, char *out, size_t size)
{
	struct api a;
	CUuuid u;
	const unsigned char *b = (const unsigned char *)u.bytes;
	CUdevice d;

	api_open(&a, driver);
	must(a.cuInit(0), "cuInit");
	must(a.cuDeviceGet(&d, 0), "cuDeviceGet");
	must(a.cuDeviceGetUuid(&u, d), "cuDeviceGetUuid");
	snprintf(out, size,
		 "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", b[0],
		 b[1], b[2], b[3], b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13],
		 b[14], b[15]);
}

/* The slice names its GPU by UUID, which only the driver knows. Asked in a child, so that this
 * process has opened no library yet. */
static void ask_uuid(const char *driver, char *out, size_t size)
{
	int fd[2];

	if (pipe(fd))
		die("no pipe");
	fflush(stdout);
	if (fork() == 0) {
		driver_uuid(driver, out, size);
		_exit(write(fd[1], out, size) != (ssize_t)size);
	}
	close(fd[1]);
	if (read(fd[0], out, size) != (ssize_t)size)
		die("%s gives no UUID", driver);
	close(fd[0]);
	wait(NULL);
}

void slice_for(const struct setting *s, unsigned cores, char *dir, unsigned dir_size, char *library,
	       unsigned library_size)
{
	static unsigned n;
	struct slice_spec spec = {.driver = s->null_driver, .shim = s->shim, .cores = cores};

	ask_uuid(s->null_driver, spec.uuid, sizeof spec.uuid);
	snprintf(dir, dir_size, "/tmp/tranche-bench-%d-%u", (int)getpid(), n++);
	slice_lay_out(dir, &spec, library, library_size);
}

void pair_open(struct pair *p, const struct setting *s, unsigned cores)
{
	char library[4096];

	slice_for(s, cores, p->dir, sizeof p->dir, library, sizeof library);
	pair_open_in(p, s, library);
}

void pair_open_in(struct pair *p, const struct setting *s, const char *library)
{
	CUmodule m;
	void *h, *calls;

	api_open(&p->direct, s->null_driver);
	api_open(&p->ours, library);
	if (p->ours.cuLaunchKernel == p->direct.cuLaunchKernel)
		die("%s does not stand in front of %s", s->shim, s->null_driver);
	h = dlopen(s->null_driver, RTLD_NOW | RTLD_NOLOAD);
	calls = h ? dlsym(h, "tr_null_calls") : NULL;
	if (!calls)
		die("%s is not the null driver: it has no tr_null_calls", s->null_driver);
	p->calls = calls;
	p->context = api_start(&p->ours);
	must(p->ours.cuModuleLoadData(&m, "empty"), "cuModuleLoadData");
	must(p->ours.cuModuleGetFunction(&p->kernel, m, "empty"), "cuModuleGetFunction");
}

void pair_close(struct pair *p)
{
	slice_remove(p->dir);
}
