/* What a program of CUDA's runtime does first, over whichever libcuda.so.1 the loader finds:
 * runtime LIBCUDART. One line for each call: its result, an error number of the runtime. */
#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

static void *lib;

static void *get(const char *name)
{
	void *p = dlsym(lib, name);

	if (!p) {
		fprintf(stderr, "runtime: %s\n", dlerror());
		exit(2);
	}
	return p;
}

int main(int argc, char **argv)
{
	int (*version)(int *), (*count)(int *), (*set)(int), (*alloc)(void **, size_t);
	int (*copy)(void *, const void *, size_t, int), (*release)(void *), (*info)(size_t *, size_t *);
	int (*pick)(void), r, n = -1;
	unsigned char out[4096], back[4096] = { 0 };
	size_t avail = 0, total = 0;
	void *p = NULL;

	lib = argc == 2 ? dlopen(argv[1], RTLD_NOW) : NULL;
	if (!lib) {
		fprintf(stderr, "runtime: %s\n", argc == 2 ? dlerror() : "usage: runtime LIBCUDART");
		return 2;
	}
	version = get("cudaDriverGetVersion");
	count = get("cudaGetDeviceCount");
	set = get("cudaSetDevice");
	alloc = get("cudaMalloc");
	copy = get("cudaMemcpy");
	release = get("cudaFree");
	info = get("cudaMemGetInfo");
	pick = get("cudaGetLastError");

	r = version(&n);
	printf("cudaDriverGetVersion %d %d\n", r, n);
	r = count(&n);
	printf("cudaGetDeviceCount %d %d\n", r, n);
	if (r)
		return 0;
	pick();
	printf("cudaSetDevice %d\n", set(0));
	r = alloc(&p, 64 << 20);
	printf("cudaMalloc %d\n", r);
	if (r)
		return 0;
	for (size_t i = 0; i < sizeof(out); i++)
		out[i] = (unsigned char)(i * 7);
	printf("cudaMemcpy %d", copy(p, out, sizeof(out), 1));
	printf(" %d", copy(back, p, sizeof(back), 2));
	printf(" %s\n", back[4095] == out[4095] && back[1] == out[1] ? "same" : "other");
	r = info(&avail, &total);
	printf("cudaMemGetInfo %d %zu %zu\n", r, avail >> 20, total >> 20);
	r = alloc(&p, (size_t)4 << 40);
	printf("cudaMalloc 4 TiB %d\n", r);
	printf("cudaFree %d\n", release(NULL));
	return 0;
}
