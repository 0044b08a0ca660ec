/* Words to the user: TRANCHE_TRACE=1 (stderr) or =FILE shows each decision. Costs one load of a
 * flag when off. Lines are written with one write(2), no stdio, no allocation. */
#ifndef TRANCHE_TRACE_H
#define TRANCHE_TRACE_H
#include <stdbool.h>

extern bool tr_trace_on;
void tr_trace_init(void);
void tr_trace_write(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
#define TR_TRACE(...)                                                                              \
	do {                                                                                       \
		if (__builtin_expect(tr_trace_on, 0))                                              \
			tr_trace_write(__VA_ARGS__);                                               \
	} while (0)

/* One line on stderr, whether tracing or not: "tranche: ..." */
void tr_complain(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
#endif
