/* Linked with the driver's library directly. Prints where the functions come from that it calls,
 * and what cuInit says. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>

int cuInit(unsigned flags);
int cuMemAlloc_v2(unsigned long long *p, unsigned long size);
int cuDriverGetVersion(int *version);

static void where(const char *name, const void *p)
{
	Dl_info info;

	printf("%s %s\n", name, dladdr(p, &info) ? info.dli_fname : "?");
}

int main(void)
{
	int version = 0;

	where("cuInit", *(void **)(void *[]){ dlsym(RTLD_DEFAULT, "cuInit") });
	where("cuInit", (const void *)cuInit);
	where("cuMemAlloc_v2", (const void *)cuMemAlloc_v2);
	where("cuDriverGetVersion", (const void *)cuDriverGetVersion);
	printf("cuInit %d\n", cuInit(0));
	cuDriverGetVersion(&version);
	printf("version %d\n", version > 0);
	return 0;
}
