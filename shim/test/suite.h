/* The test suite of libcuda.so.1: each test is a program of its own that finds our library first, in a
 * slice of its own on a simulated machine of its own. The judge is the simulator's own count, which
 * the library cannot see, and the ledger.
 *
 * A process that has called cuInit cannot fork and go on in the child. So a test either uses CUDA
 * itself or starts actors (actor()) and looks on. */
#ifndef TRANCHE_SUITE_H
#define TRANCHE_SUITE_H
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/types.h>
#include "cuda_abi.h"
#include "cuda_new.h"
#include "tranche_abi.h"

#define MIB (1ull << 20)
#define CAPACITY (1024 * MIB) /* of each simulated GPU */
#define CONTEXT (32 * MIB)
#define LIMIT (256 * MIB)

#define CHECK(x)                                                                                   \
	do {                                                                                       \
		if (!(x))                                                                          \
			suite_fail(__FILE__, __LINE__, #x, 0, 0);                                  \
	} while (0)
#define EQUAL(got, want)                                                                           \
	do {                                                                                       \
		uint64_t got_ = (uint64_t)(got), want_ = (uint64_t)(want);                         \
		if (got_ != want_)                                                                 \
			suite_fail(__FILE__, __LINE__, #got " == " #want, got_, want_);            \
	} while (0)
#define IS(call, want) EQUAL(call, want)
#define OK(call) EQUAL(call, CUDA_SUCCESS)
#define OOM CUDA_ERROR_OUT_OF_MEMORY

struct suite_test {
	const char *name;
	void (*run)(void);
	int order[TR_MAX_DEVICES]; /* the slice's devices: ordinals of the machine, the first is 0 */
	int devices;		   /* how many; 0: one, the machine's first */
	uint64_t limit;		   /* of each device; 0: LIMIT */
	int cores;		   /* compute limit, 0: none */
	bool inner;		   /* run by another test, not by itself */
	bool may_pass_limit;	   /* the test lowers the limit below what is in use */
};
extern const struct suite_test fill_tests[], share_tests[], life_tests[], slice_tests[];

__attribute__((noreturn)) void suite_fail(const char *file, int line, const char *what, uint64_t got,
					  uint64_t want);

/* The truth: bytes that the simulator has given out on the GPU of slice device d, and the most ever. */
uint64_t sim_used(int d);
uint64_t sim_peak(int d);
const char *sim_pci(int ordinal);
const char *sim_uuid(int ordinal);

/* The slice of this test. */
extern struct tr_limits *suite_limits;
extern struct tr_ledger *suite_ledger;
extern char suite_dir[128];
void suite_map(void); /* maps them anew */
/* Bytes charged on device d; dead processes' parts are given back first. */
uint64_t charged(int d);
/* Charge and truth are both so much: at once (exact) or within two seconds. */
void both(int d, uint64_t bytes);
void wait_both(int d, uint64_t bytes);

/* cuInit and a context on device 0. */
CUcontext start(void);

/* Runs f in a child that is connected by a socket. */
pid_t actor(void (*f)(int sock), int *sock);
void reap(pid_t pid); /* it must have ended well */
void end(pid_t pid);  /* kill -9 */
/* One byte each way keeps two processes in step. */
void say(int sock);
void hear(int sock);
void give(int sock, const void *p, size_t n);
void take(int sock, void *p, size_t n);
void give_fd(int sock, int fd);
int take_fd(int sock);
void nap_ms(int ms);
#endif
