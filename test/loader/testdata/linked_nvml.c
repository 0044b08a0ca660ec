/* Linked with the driver's NVML directly. Prints where the functions come from that it calls, and
 * what the oldest nvmlInit says, which is the first call. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>

int nvmlInit(void);
int nvmlDeviceGetMemoryInfo(void *device, void *memory);
const char *nvmlErrorString(int result);

static void where(const char *name, const void *p)
{
	Dl_info info;

	printf("%s %s\n", name, dladdr(p, &info) ? info.dli_fname : "?");
}

int main(void)
{
	printf("nvmlInit %d\n", nvmlInit());
	where("nvmlInit", (const void *)nvmlInit);
	where("nvmlInit", *(void **)(void *[]){ dlsym(RTLD_DEFAULT, "nvmlInit") });
	where("nvmlDeviceGetMemoryInfo", (const void *)nvmlDeviceGetMemoryInfo);
	where("nvmlErrorString", (const void *)nvmlErrorString);
	printf("text %d\n", nvmlErrorString(0)[0] != 0);
	return 0;
}
