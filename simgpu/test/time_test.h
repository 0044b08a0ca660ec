/* Each test runs in a process of its own (a forked one can't use CUDA after its parent did), on one
 * simulated machine with two GPUs. It reads the truth straight from the state file. Nothing here
 * depends on how fast or how busy the machine is, but for a few generous bounds. */
#ifndef TIME_TEST_H
#define TIME_TEST_H
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "cuda_abi.h"
#include "cuda_new.h"
#include "state.h"

extern int failures;
#define CHECK(cond, ...)                                                                           \
	do {                                                                                       \
		if (!(cond)) {                                                                     \
			printf("%s:%d: %s: ", __FILE__, __LINE__, #cond);                          \
			printf(" " __VA_ARGS__);                                                   \
			printf("\n");                                                              \
			failures++;                                                                \
		}                                                                                  \
	} while (0)
/* The call must return `want`. */
#define WANT(want, call)                                                                           \
	do {                                                                                       \
		CUresult r_ = (call);                                                              \
		if (r_ != (want)) {                                                                \
			printf("%s:%d: %s: %d, not %s\n", __FILE__, __LINE__, #call, (int)r_, #want); \
			failures++;                                                                \
		}                                                                                  \
	} while (0)
#define OK(call) WANT(CUDA_SUCCESS, call)

extern CUcontext ctx0;
extern CUfunction spin, spin_flag, other;

void setup(void);		      /* cuInit, a context on GPU 0, the kernels */
void launch_spin(CUstream s, uint64_t ns); /* one block */
void launch_full(CUstream s, uint64_t ns); /* fills the GPU */
uint64_t busy_ns(int gpu, pid_t pid);	   /* the truth, now */
float elapsed_ms(CUevent a, CUevent b);
CUevent event(void);
CUstream stream(void); /* non-blocking */

struct test {
	const char *name;
	void (*fn)(void);
};
extern const struct test capture_tests[], graph_tests[];
#endif
