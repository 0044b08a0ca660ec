/* A slice directory of one GPU and a copy of our library that points to it, laid out as
 * `tranche run` does, but over any driver file. */
#ifndef BENCH_SLICE_H
#define BENCH_SLICE_H
#include <stdbool.h>
#include <stdint.h>

struct slice_spec {
	const char *driver; /* driver library that ours stands before */
	const char *shim;   /* our library, as built */
	char uuid[48];
	unsigned cores; /* 0: no compute limit */
};

/* Makes `dir` and fills it. `library` gets the path of the copy to open. Ends the program on
 * failure. */
void slice_lay_out(const char *dir, const struct slice_spec *s, char *library, unsigned size);
/* Bytes charged to the slice's GPU, from the ledger. */
uint64_t slice_used(const char *dir);
void slice_remove(const char *dir);
#endif
