/* $TRANCHE_SIM_TRACE=1 (stderr) or =FILE; "2" or "2:FILE" shows every call. One write(2) a line. */
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "state.h"

int sim_trace_level;
static int trace_fd = 2;

__attribute__((constructor)) static void trace_init(void)
{
	const char *v = getenv("TRANCHE_SIM_TRACE");
	if (!v || !*v || !strcmp(v, "0"))
		return;
	sim_trace_level = v[0] == '2' && (!v[1] || v[1] == ':') ? 2 : 1;
	if (v[0] == '2' && v[1] == ':')
		v += 2;
	if (!strcmp(v, "1") || !strcmp(v, "2"))
		return;
	int fd = open(v, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
	if (fd >= 0)
		trace_fd = fd;
}

void sim_trace_write(const char *fmt, ...)
{
	char line[512];
	int saved = errno;
	int n = snprintf(line, sizeof line, "simgpu[%d]: ", (int)getpid());
	va_list ap;
	va_start(ap, fmt);
	n += vsnprintf(line + n, sizeof line - (size_t)n - 1, fmt, ap);
	va_end(ap);
	if (n > (int)sizeof line - 2)
		n = (int)sizeof line - 2;
	line[n++] = '\n';
	if (write(trace_fd, line, (size_t)n) < 0) {
		/* nobody to tell */
	}
	errno = saved;
}
